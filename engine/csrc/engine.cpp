// Every file of this folder as one, since libtorch's headers take ten times as long to compile as the code.
#include "collectives.cpp"
#include "fused.cpp"
#include "shim.cpp"
#include "slices.cpp"
#include "streams.cpp"
#include "sums.cpp"
#include "tensor_bytes.cpp"
#include "tokens.cpp"
