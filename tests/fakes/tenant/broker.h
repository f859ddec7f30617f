/* The node's host PID broker, as HAMi's client asks it. */
#ifndef TENANT_BROKER_H
#define TENANT_BROKER_H

/* The number to write into the slot, or 0: not asked for by the environment, not to be believed, or not told. */
int broker_number(const char *path);

#endif
