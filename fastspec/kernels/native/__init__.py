"""Operations of a round on the CPU in C++, compiled on the machine that runs them: `kernels.cpp`, how it is built, and
its ops."""
