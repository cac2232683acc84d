/* A stand-in for the driver's libcuda.so.1: devices and their names, from STAND_IN_CARDS. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, NOT_FOUND = 500 };
enum { MULTIPROCESSORS = 16, MAJOR = 75, MINOR = 76 };

static const char *cards(void) {
  const char *named = getenv("STAND_IN_CARDS");
  return named != NULL ? named : "stand-in";
}

/* Number of devices, which libtorch's stand-in asks too. */
int stand_in_cards(void) {
  int count = 1;
  for (const char *at = cards(); *at != '\0'; ++at) count += *at == ',';
  return count;
}

int cuInit(unsigned flags) { return flags == 0 ? SUCCESS : INVALID_VALUE; }

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= stand_in_cards()) return INVALID_DEVICE;
  *device = ordinal;
  return SUCCESS;
}

int cuDeviceGetName(char *name, int length, int device) {
  const char *at = cards();
  for (; device > 0; --device) at = strchr(at, ',') + 1;
  const size_t width = strcspn(at, ",");
  if (length <= 0 || width >= (size_t)length) return INVALID_VALUE;
  memcpy(name, at, width);
  name[width] = '\0';
  return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  switch (attribute) {
    case MULTIPROCESSORS: *value = 132; return SUCCESS;
    case MAJOR: *value = 9; return SUCCESS;
    case MINOR: *value = 0; return SUCCESS;
    default: return INVALID_VALUE;
  }
}

/* A context is the number of its device, from 1. */
static _Thread_local void *context;

int cuDevicePrimaryCtxRetain(void **result, int device) {
  *result = (void *)(intptr_t)(device + 1);
  return SUCCESS;
}

int cuCtxGetCurrent(void **result) {
  *result = context;
  return SUCCESS;
}

int cuCtxSetCurrent(void *next) {
  context = next;
  return SUCCESS;
}

/* A function of libtorch's stand-in, which has the kernels for the processor. */
static void *of_libtorch(const char *name) {
  void *library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW);
  return library != NULL ? dlsym(library, name) : NULL;
}

int cuModuleLoadData(void **module, const void *image) {
  if (image == NULL || context == NULL) return INVALID_VALUE;
  *module = (void *)1;
  return SUCCESS;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
  const void *(*find)(const char *) = (const void *(*)(const char *))of_libtorch("stand_in_kernel");
  if (find == NULL || module == NULL) return INVALID_VALUE;
  *function = (void *)find(name);
  return *function != NULL ? SUCCESS : NOT_FOUND;
}

int cuLaunchKernel(void *function, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **arguments, void **extra) {
  void (*launch)(const void *, int, void *, void **) =
      (void (*)(const void *, int, void *, void **))of_libtorch("stand_in_launch");
  const int is_flat = y == 1 && z == 1 && ty == 1 && tz == 1 && shared == 0 && extra == NULL;
  if (launch == NULL || context == NULL || blocks == 0 || threads == 0 || threads > 1024 || !is_flat) return INVALID_VALUE;
  launch(function, (int)((intptr_t)context - 1), stream, arguments);
  return SUCCESS;
}

/* NVRTC looks for tables of functions in a driver that is there, and takes an empty one for an old driver's. */
int cuGetExportTable(const void **table, const void *id) {
  static const size_t size_of_empty = sizeof(size_t);
  *table = &size_of_empty;
  return id != NULL ? SUCCESS : INVALID_VALUE;
}
