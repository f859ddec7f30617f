/* The fixed-width types of the kernel, and nothing of the kernel. */
#pragma once

typedef unsigned char __u8, u8;
typedef unsigned short __u16, u16, __le16, __be16, __sum16;
typedef unsigned int __u32, u32, __le32, __be32, __wsum;
typedef unsigned long long __u64, u64, __le64, __be64;
typedef signed char __s8, s8;
typedef short __s16, s16;
typedef int __s32, s32;
typedef long long __s64, s64;
typedef _Bool bool;
typedef unsigned long size_t, uintptr_t;
typedef int pid_t;

#define __aligned_u64 __u64 __attribute__((aligned(8)))
#define __always_inline inline __attribute__((always_inline))
#define true 1
#define false 0
#define NULL ((void *)0)
