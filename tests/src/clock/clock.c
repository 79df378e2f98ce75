/* Moves the wall clock of a process, which LD_PRELOAD makes load this library. $CSID_CLOCK names a file with two 64-bit numbers: the seconds by
   which the clock is ahead, and the seconds by which it was ahead when the process read it last. The library writes the second one. A change
   of the first one counts at once. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead;

__attribute__((constructor)) static void begin(void) {
	const char *file = getenv("CSID_CLOCK");
	int fd = file ? open(file, O_RDWR | O_CLOEXEC) : -1;
	if (fd < 0) {
		return;
	}
	void *mapped = mmap(NULL, 2 * sizeof *ahead, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (mapped != MAP_FAILED) {
		ahead = mapped;
	}
}

int clock_gettime(clockid_t clock, struct timespec *now) {
	int result = (int)syscall(SYS_clock_gettime, clock, now);
	if (result == 0 && clock == CLOCK_REALTIME && ahead) {
		int64_t seconds = ahead[0];
		now->tv_sec += seconds;
		ahead[1] = seconds;
	}
	return result;
}
