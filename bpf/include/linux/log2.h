/* Included by the helpers of BCC; pidmap.c uses nothing of it. */
#pragma once
