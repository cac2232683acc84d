// LD_PRELOADed into stock PyTorch: MKL then takes its AVX-512 kernels on any processor that has
// AVX-512, as it does in Shoal (engine/src/device/mkl.rs).
int mkl_serv_intel_cpu_true(void) { return 1; }
