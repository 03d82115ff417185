"""`fastspec chat`: a conversation in the terminal in which strategies answer, and are compared; docs/guide/chat.md
shows it.

`session.Chat` holds the model and the conversation, `settings` reads what the model is patched with, `commands` is the
table of commands, `view` what is shown, and `loop` reads lines and runs them.
"""
