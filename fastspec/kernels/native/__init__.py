"""Operations of a round on the CPU in C++: `kernels.cpp`, how it is built on the machine that runs it, and its ops."""
