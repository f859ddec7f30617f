/* Asked for by the helpers of BCC; the kernel stopped looking at a program's version in 5.0. */
#pragma once

#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + (patch))
#ifndef LINUX_VERSION_CODE
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 8, 0)
#endif
