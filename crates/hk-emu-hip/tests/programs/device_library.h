// What printf and assert of device code need of ROCm's device libraries: packets for the host, and the buffer of buffered
// printf. Written from the protocol that src/hostcall.rs and src/printf.rs serve.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long;

struct Header {
    u64 next, lanes;
    u32 service, control;
};
struct Payload {
    u64 slots[64][8];
};
struct Signal {
    u64 kind, value, *mailbox;
    u32 event;
};
struct HostcallBuffer {
    Header *headers;
    Payload *payloads;
    Signal *doorbell;
    u64 free, ready, mask;
};

__device__ inline void push(u64 *stack, u64 packet, Header &header) {
    u64 top = __hip_atomic_load(stack, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    do header.next = top;
    while (!__hip_atomic_compare_exchange_weak(stack, &top, packet, __ATOMIC_RELEASE, __ATOMIC_RELAXED,
                                               __HIP_MEMORY_SCOPE_SYSTEM));
}

// A call of the host by all lanes that run: the first one moves the packet, each has a slot. The answer is its first word.
__device__ inline u64 hostcall(u32 service, const u64 (&words)[8]) {
    auto &buffer = *((HostcallBuffer **)__builtin_amdgcn_implicitarg_ptr())[10];
    u32 lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
    bool first = lane == (u32)__builtin_amdgcn_readfirstlane(lane);
    u64 packet = 0;
    if (first) {
        packet = __hip_atomic_load(&buffer.free, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
        u64 next;
        do
            next = __hip_atomic_load(&buffer.headers[packet & buffer.mask].next, __ATOMIC_RELAXED,
                                     __HIP_MEMORY_SCOPE_SYSTEM);
        while (!__hip_atomic_compare_exchange_weak(&buffer.free, &packet, next, __ATOMIC_ACQUIRE, __ATOMIC_ACQUIRE,
                                                   __HIP_MEMORY_SCOPE_SYSTEM));
    }
    packet = (u64)(u32)__builtin_amdgcn_readfirstlane(packet >> 32) << 32 | (u32)__builtin_amdgcn_readfirstlane(packet);
    Header &header = buffer.headers[packet & buffer.mask];
    u64 *slot = buffer.payloads[packet & buffer.mask].slots[lane];
    for (int i = 0; i < 8; i++) slot[i] = words[i];
    u64 lanes = __builtin_amdgcn_read_exec();
    if (first) {
        header.lanes = lanes;
        header.service = service;
        header.control = 1;
        push(&buffer.ready, packet, header);
        Signal &bell = *buffer.doorbell;
        __hip_atomic_fetch_add(&bell.value, 1, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
        __hip_atomic_store(bell.mailbox, bell.event, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
        __builtin_amdgcn_s_sendmsg(1, bell.event);
    }
    while (__builtin_amdgcn_readfirstlane(
        __hip_atomic_load(&header.control, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM) & 1))
        __builtin_amdgcn_s_sleep(1);
    u64 answer = *(volatile u64 *)slot;
    if (first) push(&buffer.free, packet + buffer.mask + 1, header);
    return answer;
}

constexpr u32 kPrintf = 2;
constexpr u64 kBegin = 1, kEnd = 2;

extern "C" __device__ inline u64 message_begin(u64 stream) {
    return hostcall(kPrintf, {kBegin | 1 << 5, stream, 0, 0, 0, 0, 0, 0});
}

extern "C" __device__ u64 __ockl_printf_begin(u64) { return message_begin(0); }

extern "C" __device__ u64 __ockl_printf_append_args(u64 message, u32 count, u64 a, u64 b, u64 c, u64 d, u64 e, u64 f,
                                                    u64 g, u32 last) {
    message = (message & ~(7ul << 5)) | (u64)count << 5 | (last ? kEnd : 0);
    return hostcall(kPrintf, {message, a, b, c, d, e, f, g});
}

extern "C" __device__ u64 __ockl_printf_append_string_n(u64 message, const char *text, u64 bytes, u32 last) {
    do {
        u64 words[8] = {}, here = bytes < 56 ? bytes : 56;
        for (u64 i = 0; i < here; i++) words[1 + i / 8] |= (u64)(unsigned char)text[i] << 8 * (i % 8);
        bytes -= here;
        text += here;
        words[0] = (message & ~(7ul << 5)) | (here + 7) / 8 << 5 | (last && !bytes ? kEnd : 0);
        message = hostcall(kPrintf, words);
    } while (bytes);
    return message;
}

__device__ inline u64 length(const char *text) {
    u64 n = 0;
    while (text[n]) n++;
    return n + 1;
}

extern "C" __device__ inline void __assert_fail(const char *what, const char *file, u32 line, const char *function) {
    const char format[] = "%s:%u: %s: Device-side assertion `%s' failed.\n";
    u64 message = message_begin(1);
    message = __ockl_printf_append_string_n(message, format, sizeof format, 0);
    message = __ockl_printf_append_string_n(message, file, length(file), 0);
    message = __ockl_printf_append_args(message, 1, line, 0, 0, 0, 0, 0, 0, 0);
    message = __ockl_printf_append_string_n(message, function, length(function), 0);
    __ockl_printf_append_string_n(message, what, length(what), 1);
    __builtin_trap();
}

extern "C" __device__ char *__printf_alloc(u32 bytes) {
    auto *buffer = ((u32 **)__builtin_amdgcn_implicitarg_ptr())[9];
    u32 at = __hip_atomic_load(buffer, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    do
        if (at + bytes > buffer[1]) return nullptr;
    while (!__hip_atomic_compare_exchange_weak(buffer, &at, at + bytes, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                               __HIP_MEMORY_SCOPE_AGENT));
    return (char *)(buffer + 2) + at;
}
