/* main NAME: runs one test against the csid of $CSID_SOCKET. */
#include "test.h"

static const struct { const char *name; void (*run)(void); } tests[] = {
    {"path", path}, {"opening", opening}, {"again", again}, {"arguments", arguments}, {"errors", errors}, {"cancel", cancel}, {"deadline", deadline},
    {"restart", restart}, {"events", events}, {"journal", journal}, {"volumes", volumes}, {"threads", threads}, {"forked", forked}, {"panics", panics},
    {"closing", closing}, {"fuzz", fuzz},
};

int main(int argc, char **argv)
{
    for (size_t i = 0; argc == 2 && i < sizeof tests / sizeof *tests; i++)
        if (strcmp(argv[1], tests[i].name) == 0) {
            tests[i].run();
            return 0;
        }
    fprintf(stderr, "no test of that name\n");
    return 2;
}
