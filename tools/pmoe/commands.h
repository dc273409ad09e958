/* The commands of `pmoe`. Each parses its own line and returns an exit status. */
#ifndef PMOE_COMMANDS_H
#define PMOE_COMMANDS_H

enum { EXIT_OK = 0, EXIT_USAGE = 2, EXIT_FAILED = 3 };

/* argv[0] is "pmoe groups". */
int command_groups(int argc, char **argv);

#endif
