/* Preloaded before libcudart: one pretended H100 of 80 GB, whose streams and events are done at once. */
#include <string.h>
#define DOES_NOTHING(name) int name() { return 0; }
#define ANSWERS(name, type, answer) int name(type *value) { *value = answer; return 0; }
static const unsigned long FREE = 70ul << 30, TOTAL = 80ul << 30;

ANSWERS(cudaGetDeviceCount, int, 1)
ANSWERS(cudaGetDevice, int, 0)
ANSWERS(cudaDriverGetVersion, int, 13020)
ANSWERS(cudaRuntimeGetVersion, int, 13020)
ANSWERS(cudaGetDeviceFlags, unsigned, 0)
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaMemGetInfo(unsigned long *free, unsigned long *total) { *free = FREE; *total = TOTAL; return 0; }
/* fields of cudaDeviceProp of CUDA 13 by their offsets: memory, threads of a warp and block, capability 9.0, processors */
int cudaGetDeviceProperties(char *properties, int device) {
    memset(properties, 0, 1008);
    strcpy(properties, "Pretended H100");
    *(unsigned long *)(properties + 288) = TOTAL;
    *(unsigned long *)(properties + 296) = 49152;
    *(int *)(properties + 308) = 32;
    *(int *)(properties + 320) = 1024;
    *(int *)(properties + 360) = 9;
    *(int *)(properties + 384) = 132;
    return 0;
}
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = (void *)0x10; return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *capturing) { *capturing = 0; return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)0x20; return 0; }
int cudaEventElapsedTime(float *milliseconds, void *start, void *end) { *milliseconds = 1; return 0; }
DOES_NOTHING(cudaSetDevice)
DOES_NOTHING(cudaGetLastError)
DOES_NOTHING(cudaPeekAtLastError)
DOES_NOTHING(cudaEventRecord)
DOES_NOTHING(cudaEventRecordWithFlags)
DOES_NOTHING(cudaEventQuery)
DOES_NOTHING(cudaEventDestroy)
DOES_NOTHING(cudaEventSynchronize)
DOES_NOTHING(cudaStreamWaitEvent)
DOES_NOTHING(cudaStreamSynchronize)
DOES_NOTHING(cudaStreamQuery)
DOES_NOTHING(cudaDeviceSynchronize)
DOES_NOTHING(cudaFree)
