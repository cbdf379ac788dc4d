// What does not depend on the kernel: compiled once, with optimisation, and linked to all libraries.
// One file, so that block_starts is there before what is put into it.
#include "cuda.h"
#include "launch.h"

#include "fibers.cpp"
#include "cluster.cpp"
#include "launch.cpp"
#include "cuda.cpp"
#include "dot.cpp"
#include "mma.cpp"
#include "hopper.cpp"
