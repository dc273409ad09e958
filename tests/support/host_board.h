/* A host's own collectives, for tests of the callbacks transport: ranks that are threads meet at a board. */
#ifndef TEST_HOST_BOARD_H
#define TEST_HOST_BOARD_H
#include <pmoe/comm.h>

typedef struct host_board host_board;

host_board *host_board_create(int32_t nranks);
void host_board_destroy(host_board *board);
/* The callbacks of one rank; released with its communicator, or with release(user). */
pmoe_comm_callbacks host_board_callbacks(host_board *board, int32_t rank);

#endif
