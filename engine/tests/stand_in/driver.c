/* A stand-in for the driver's libcuda.so.1: devices and their names, from STAND_IN_CARDS. */

#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101 };
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
