/* BCC carries a copy of the BPF interface of the kernel. */
#include <bcc/bpf.h>
