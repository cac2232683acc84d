//! Tests of whole Shoal swarms: real processes, real sockets.
