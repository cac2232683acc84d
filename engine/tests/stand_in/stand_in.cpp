// Every file of this folder as one, since libtorch's headers take ten times as long to compile as the code.
#include "stand_in.h"

#include "counts.cpp"
#include "streams.cpp"
#include "memory.cpp"
#include "copies.cpp"
#include "kernels.cpp"
#include "attention.cpp"
#include "launches.cpp"
