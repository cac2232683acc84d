// Preloaded, it fails reads, writes or reservations of files without a name, which are those of swapped stages and of the
// output log: FAIL_READ, FAIL_WRITE and FAIL_RESERVE are the numbers of calls that succeed before, and FAIL_WITH is the
// number of the error.
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int fails(const char *limit, atomic_long *calls, int descriptor) {
    const char *succeed = getenv(limit), *error = getenv("FAIL_WITH");
    struct stat file;
    if (!succeed || !error || fstat(descriptor, &file) != 0 || file.st_nlink != 0) return 0;
    if (atomic_fetch_add(calls, 1) < atol(succeed)) return 0;
    errno = atoi(error);
    return 1;
}

ssize_t pread64(int descriptor, void *bytes, size_t count, off64_t offset) {
    static atomic_long calls;
    if (fails("FAIL_READ", &calls, descriptor)) return -1;
    return syscall(SYS_pread64, descriptor, bytes, count, offset);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t offset) {
    static atomic_long calls;
    if (fails("FAIL_WRITE", &calls, descriptor)) return -1;
    return syscall(SYS_pwrite64, descriptor, bytes, count, offset);
}

int fallocate64(int descriptor, int mode, off64_t offset, off64_t count) {
    static atomic_long calls;
    if (mode == 0 && fails("FAIL_RESERVE", &calls, descriptor)) return -1;
    return syscall(SYS_fallocate, descriptor, mode, offset, count);
}

int fallocate(int descriptor, int mode, off_t offset, off_t count) {
    return fallocate64(descriptor, mode, offset, count);
}
