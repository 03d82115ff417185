"""Operations on raw tensors, in the order of a round. Each folder has a reference in plain torch, which its kernels are
held to.

- `layer/`, `linear/`, `attention/`, `recurrent/`: the passes of a model or of a head
- `drafting/`: growing a draft tree
- `verification/`, `cache/`: choosing tokens, and keeping the accepted path
- `parallel/`: sums over processes that share a model
- `native/`: the same operations in C++ for the CPU
- `launch`, `tuned_launches`, `ahead`: what launches share, launches that were tuned on this machine, and compiling
  before a first run
"""
