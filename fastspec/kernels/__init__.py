"""Operations on raw tensors, in the order of a round. Each folder has a reference in plain torch, which its kernels are
held to.

Letters: B rows (sequences), N nodes of a row's tree, P of its longest path, Hq query heads, Hkv key heads, D head size,
C cache slots, W 64-bit words, V tokens, H width. Whole numbers are int64. Lengths are tensors on the device, and no op
waits for the host.

- `layer/`, `linear/`, `attention/`, `recurrent/`: the passes of a model or of a head
- `drafting/`: growing a draft tree
- `verification/`, `cache/`: choosing tokens, and keeping the accepted path
- `parallel/`: sums over processes that share a model
- `native/`: the same operations in C++ for the CPU
- `arguments`, `launch`, `tuned_launches`, `ahead`: checks of tensors, what launches share, launches that were tuned on
  this machine, and compiling before a first run
"""
