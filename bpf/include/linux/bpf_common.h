/* bcc/bpf.h, which comes with BCC, has what it needs of this. */
#pragma once
