/* A real load on a real GPU, through CUDA's driver API alone: libcuda.so.1, which every driver brings. */
#ifndef TENANT_CUDA_H
#define TENANT_CUDA_H

#include <stdint.h>

/* Each returns 0, or -1 after a message on stderr. One device per process; not after a fork. */
int cuda_open(void);
int cuda_context(const char *uuid, uint64_t memory);
int cuda_load(int sm);
long long cuda_busy_us(void); /* of its kernels so far */

#endif
