/* Moves the wall clock of a process, which LD_PRELOAD makes load this library. $CSID_CLOCK names a file with the seconds by which the clock
   is ahead, as a 64-bit number. A change of the file counts at once. */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;

__attribute__((constructor)) static void begin(void) {
	const char *file = getenv("CSID_CLOCK");
	int fd = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
	if (fd < 0) {
		return;
	}
	void *mapped = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
	close(fd);
	if (mapped != MAP_FAILED) {
		ahead = mapped;
	}
}

int clock_gettime(clockid_t clock, struct timespec *now) {
	int result = (int)syscall(SYS_clock_gettime, clock, now);
	if (result == 0 && clock == CLOCK_REALTIME && ahead) {
		now->tv_sec += *ahead;
	}
	return result;
}
