// What kernels need of the library: a thread pool and scratch memory, declared without the
// standard library so that no inline function is compiled under two instruction sets.
#pragma once

#include "abi.h"

namespace twk {

// Runs `task(argument, index, thread)` for every index in [0, count), each exactly once, on the
// context's threads; returns when all are done. Which thread runs what is not determined: a task
// must write only what belongs to its index.
using Task = void (*)(void* argument, int64_t index, int thread);
void run_tasks(TwkContext* context, int64_t count, Task task, void* argument);
int thread_count(const TwkContext* context);

// Uninitialised memory, 64-byte aligned, valid until the next call for the same use and thread.
enum class Use { kQuery, kHidden, kNormed, kProjected, kAttended, kGateUp, kActive,
                 kPartials, kTasks, kQuantized, kScales, kSums, kAdded, kCount };
void* scratch(TwkContext* context, Use use, int64_t bytes);
void* thread_scratch(TwkContext* context, int thread, int64_t bytes);

}  // namespace twk
