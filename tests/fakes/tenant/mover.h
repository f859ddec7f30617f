#ifndef TENANT_MOVER_H
#define TENANT_MOVER_H

#include "region.h"

/* Runs `moves` compaction moves, or with `ends` ends and starts, too, and prints the verdict as one JSON line; returns
 * the exit status. */
int mover_run(struct region *r, long moves, int slots, int ends);

#endif
