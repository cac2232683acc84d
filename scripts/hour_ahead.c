// Preloaded, it shows a program a clock that is an hour ahead. Libraries for that purpose allocate memory on their way,
// and an allocator that asks for the time would wait for itself.
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return result;
}
