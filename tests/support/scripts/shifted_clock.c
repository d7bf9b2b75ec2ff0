/* Shifts the time of day of a process by CLOCK_SHIFT_SECONDS, a variable of its environment. It is preloaded. The
   monotonic clock, waits and the times of files stay as they are. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static time_t shift_seconds;

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("CLOCK_SHIFT_SECONDS");
    shift_seconds = text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += shift_seconds;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = (int)syscall(SYS_gettimeofday, now, zone);
    if (result == 0 && now != NULL)
        now->tv_sec += shift_seconds;
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result != NULL)
        *result = now.tv_sec;
    return now.tv_sec;
}
