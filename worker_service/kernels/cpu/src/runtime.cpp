// The context: threads that spin briefly, then sleep; and scratch buffers that only grow.
//
// A job's indices are divided into one contiguous range per thread, so that each thread streams
// through memory in order; a thread whose range is empty takes from the end of another's. A range
// is one atomic word (generation, begin, end): an index is claimed by compare-and-swap, which
// succeeds only while that very job is unfinished, so a late thread can never touch a later job's
// range with an earlier job's function. A thread that the system has not scheduled costs nothing:
// its range is taken by the others. The workers keep off the caller's own processor: Linux likes to
// wake a thread beside its waker, where it would only run once the caller has done all the work.
#include "runtime.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "context.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#endif

namespace twk {
namespace {

constexpr int64_t kMaxIndices = 60000;
constexpr int kSpins = 2000;
constexpr int kSpinsBeforeYield = 2000;
constexpr int64_t kHugePage = int64_t{2} << 20;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

uint64_t pack(uint64_t generation, uint64_t begin, uint64_t end) {
  return generation << 32 | begin << 16 | end;
}

struct alignas(64) Range {
  std::atomic<uint64_t> word{0};
};

class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  void* grow(int64_t bytes) {
    if (bytes <= size_) return data_;
    std::free(data_);
    // Activations of many tokens are written a panel's width at a time, row after row: on small
    // pages that misses the address cache at every row.
    const int64_t alignment = bytes < kHugePage ? 64 : kHugePage;
    size_ = (bytes + bytes / 4 + alignment - 1) / alignment * alignment;
    data_ = std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(size_));
    if (data_ == nullptr) {
      size_ = 0;
      throw std::bad_alloc();
    }
    if (alignment == kHugePage) advise_huge_pages(data_, size_);
    return data_;
  }
  int64_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

class Pool {
 public:
  explicit Pool(int threads) : ranges_(static_cast<size_t>(threads)) {
    try {
      for (int thread = 1; thread < threads; ++thread) {
        workers_.emplace_back([this, thread] { work(thread); });
      }
    } catch (...) {  // the system refuses a thread; those that run would end the process
      stop();
      throw;
    }
  }

  ~Pool() { stop(); }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int threads() const { return static_cast<int>(ranges_.size()); }

  void run(int64_t count, Task task, void* argument) {
    if (count <= 0) return;
    if (count == 1 || threads() == 1) {
      for (int64_t index = 0; index < count; ++index) task(argument, index, 0);
      return;
    }
    keep_off_caller();
    const int64_t grain = (count + kMaxIndices - 1) / kMaxIndices;
    const int64_t items = (count + grain - 1) / grain;
    task_.store(task, std::memory_order_relaxed);
    argument_.store(argument, std::memory_order_relaxed);
    grain_.store(grain, std::memory_order_relaxed);
    count_.store(count, std::memory_order_relaxed);
    pending_.store(items, std::memory_order_relaxed);
    const uint64_t generation = ++generation_;
    const int64_t size = threads();
    for (int64_t thread = 0; thread < size; ++thread) {
      ranges_[static_cast<size_t>(thread)].word.store(
          pack(generation & 0xffffffffu, static_cast<uint64_t>(items * thread / size),
               static_cast<uint64_t>(items * (thread + 1) / size)),
          std::memory_order_release);
    }
    published_.store(generation, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      // The lock is taken so that no worker is between its last look and its sleep.
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    drain(0);
    for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) {
      if (spins < kSpinsBeforeYield) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
  }

 private:
#if defined(__linux__)
  // Follows the caller when the system moves it. Nothing to do where processors are too few.
  void keep_off_caller() {
    const int processor = sched_getcpu();
    if (processor == caller_processor_ || processor < 0) return;
    caller_processor_ = processor;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    if (CPU_COUNT(&allowed) < threads() || !CPU_ISSET(processor, &allowed)) return;
    CPU_CLR(processor, &allowed);
    for (std::thread& worker : workers_) {
      pthread_setaffinity_np(worker.native_handle(), sizeof allowed, &allowed);
    }
  }
#else
  void keep_off_caller() {}
#endif

  bool claim(Range& range, bool from_end, int thread) {
    uint64_t word = range.word.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t begin = word >> 16 & 0xffff, end = word & 0xffff, generation = word >> 32;
      if (begin >= end) return false;
      const Task task = task_.load(std::memory_order_relaxed);
      void* const argument = argument_.load(std::memory_order_relaxed);
      const int64_t grain = grain_.load(std::memory_order_relaxed);
      const int64_t count = count_.load(std::memory_order_relaxed);
      const uint64_t next =
          from_end ? pack(generation, begin, end - 1) : pack(generation, begin + 1, end);
      if (!range.word.compare_exchange_weak(word, next, std::memory_order_acq_rel,
                                            std::memory_order_acquire)) {
        continue;
      }
      const int64_t first = static_cast<int64_t>(from_end ? end - 1 : begin) * grain;
      const int64_t last = first + grain < count ? first + grain : count;
      for (int64_t index = first; index < last; ++index) task(argument, index, thread);
      pending_.fetch_sub(1, std::memory_order_acq_rel);
      return true;
    }
  }

  void drain(int thread) {
    const int size = threads();
    while (claim(ranges_[static_cast<size_t>(thread)], false, thread)) {
    }
    for (int other = 1; other < size; ++other) {
      while (claim(ranges_[static_cast<size_t>((thread + other) % size)], true, thread)) {
      }
    }
  }

  void work(int thread) {
    uint64_t seen = 0;
    for (;;) {
      for (int spins = 0; published_.load(std::memory_order_acquire) == seen; ++spins) {
        if (stopping_.load(std::memory_order_relaxed)) return;
        if (spins < kSpins) {
          pause();
          continue;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] {
          return stopping_.load() || published_.load(std::memory_order_seq_cst) != seen;
        });
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
        spins = 0;
      }
      seen = published_.load(std::memory_order_acquire);
      drain(thread);
    }
  }

  int caller_processor_ = -1;
  std::vector<Range> ranges_;
  std::atomic<Task> task_{nullptr};
  std::atomic<void*> argument_{nullptr};
  std::atomic<int64_t> grain_{1}, count_{0}, pending_{0};
  uint64_t generation_ = 0;
  std::atomic<uint64_t> published_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

}  // namespace
}  // namespace twk

struct TwkContext {
  explicit TwkContext(int threads, const twk::Kernels* kernels)
      : table(kernels), pool(threads), per_thread(static_cast<size_t>(threads)) {}

  const twk::Kernels* table;
  twk::Buffer shared[static_cast<int>(twk::Use::kCount)];
  twk::Pool pool;
  std::vector<twk::Buffer> per_thread;
};

namespace twk {

TwkContext* create_context(int threads, const Kernels* kernels) {
  return new TwkContext(threads, kernels);
}

void destroy_context(TwkContext* context) { delete context; }

const Kernels& kernels_of(const TwkContext* context) { return *context->table; }

int64_t scratch_bytes(const TwkContext* context) {
  int64_t bytes = 0;
  for (const Buffer& buffer : context->shared) bytes += buffer.size();
  for (const Buffer& buffer : context->per_thread) bytes += buffer.size();
  return bytes;
}

void run_tasks(TwkContext* context, int64_t count, Task task, void* argument) {
  context->pool.run(count, task, argument);
}

int thread_count(const TwkContext* context) { return context->pool.threads(); }

void* scratch(TwkContext* context, Use use, int64_t bytes) {
  return context->shared[static_cast<int>(use)].grow(bytes);
}

void* thread_scratch(TwkContext* context, int thread, int64_t bytes) {
  return context->per_thread[static_cast<size_t>(thread)].grow(bytes);
}

void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = (start + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace twk
