/* Switches of the kernel configuration that the helpers of BCC ask for. */
#define CONFIG_BPF_SYSCALL 1
