// SPDX-License-Identifier: MIT
//
// From one stack to another, a part of runtime.cpp: what the sanitizers want to be told of it, and the switch itself.
#pragma once

#include <cstddef>

#if defined(CPUSIM_ADDRESS)
extern "C" {
void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake, const void** bottom, size_t* size);
void __asan_unpoison_memory_region(const volatile void*, size_t);
void __asan_set_error_report_callback(void (*)(const char*));
}
#elif defined(CPUSIM_THREAD)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#endif

extern "C" void cpusim_switch(void** save, void* load);
extern "C" void cpusim_boot();
extern "C" void cpusim_fiber_main();
asm(R"(
.text
.type cpusim_switch, @function
cpusim_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size cpusim_switch, .-cpusim_switch
.type cpusim_boot, @function
cpusim_boot:
  xor %ebp, %ebp
  call cpusim_fiber_main@PLT
  hlt
.size cpusim_boot, .-cpusim_boot
)");
