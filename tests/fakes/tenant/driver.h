/* What a tenant has of the driver: a connection to the kernel's side, and NVML in its own namespace. */
#ifndef TENANT_DRIVER_H
#define TENANT_DRIVER_H

#include <stdint.h>

#define LIST_MAX 512

struct listed {
    unsigned pid;
    unsigned long long memory;
};

struct sampled {
    unsigned pid;
    unsigned sm;
};

/* The kernel's side: the driver's socket, or "cuda" for a real GPU (cuda.h). Each returns 0, or -1 after a message on stderr. */
int driver_connect(const char *socket_path);
int driver_context(const char *uuid, uint64_t memory);
int driver_load(const char *uuid, int sm);
void driver_forget(void); /* in a forked child: leave the parent's connection alone */

/* NVML through dlopen. Lists return the number of entries, 0 when idle, -1 on an error. */
int nvml_open(void);
int nvml_list(const char *uuid, struct listed *out);
int nvml_samples(const char *uuid, uint64_t since_us, int newer, struct sampled *out); /* newer: may make the second call */

#endif
