#include "uring.h"

#include <linux/time_types.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "lohan/error.h"

namespace lohan {
namespace {

// Values newer than some headers that this is built with.
constexpr uint32_t kSetupSingleIssuer = 1U << 12;  // Linux 6.0
constexpr uint32_t kSetupDeferTaskrun = 1U << 13;  // Linux 6.1
constexpr uint32_t kFeatureFastPoll = 1U << 5;     // Linux 5.7
constexpr uint32_t kFeatureWaitLimit = 1U << 8;    // Linux 5.11
constexpr uint32_t kEnterWaitLimit = 1U << 3;      // Linux 5.11
// What is relied on: one mapping for both queues, no lost completions, operations that wait for readiness
// without a thread, and a wait with a time limit.
constexpr uint32_t kFeatures =
    IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | kFeatureFastPoll | kFeatureWaitLimit;

/// What io_uring_enter(2) takes with kEnterWaitLimit.
struct WaitArgument {
  uint64_t signal_mask;
  uint32_t signal_mask_bytes;
  uint32_t reserved;
  uint64_t time_limit;  // address of a __kernel_timespec
};

int Setup(uint32_t submissions, io_uring_params& parameters) {
  return static_cast<int>(syscall(SYS_io_uring_setup, submissions, &parameters));
}

std::string LikelyCause(int error_number) {
  switch (error_number) {
    case ENOSYS:
      return "this kernel has no io_uring, or a sandbox hides it";
    case EPERM:
    case EACCES:
      return "forbidden by a seccomp filter (Docker's default profile has one) or by the sysctl "
             "kernel.io_uring_disabled";
    case ENOMEM:
      return "the limit on locked memory (`ulimit -l`) leaves no room for a ring";
    case EMFILE:
    case ENFILE:
      return "too many open files";
    default:
      return "unknown cause";
  }
}

UringRefused Refusal(const char* call, int error_number) {
  return UringRefused(std::string(call) + ": " + std::generic_category().message(error_number) + " (" +
                      LikelyCause(error_number) + ")");
}

}  // namespace

RingMapping::RingMapping(int descriptor, size_t size_bytes, int64_t offset) : size_bytes_(size_bytes) {
  void* const address =
      mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, offset);
  if (address == MAP_FAILED) throw Refusal("mmap of an io_uring", errno);
  data_ = static_cast<std::byte*>(address);
  madvise(address, size_bytes, MADV_DONTFORK);
}

RingMapping::~RingMapping() { munmap(data_, size_bytes_); }

Ring::Setup Ring::SetUp(uint32_t submissions, uint32_t completions) {
  Setup setup{};
  // Completions run in the ring's own thread when it waits, which saves an interrupt of it for each; older
  // kernels do not know the flags and say EINVAL.
  for (const uint32_t flags : {kSetupSingleIssuer | kSetupDeferTaskrun, 0U}) {
    setup.parameters = {};
    setup.parameters.flags = IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP | flags;
    setup.parameters.cq_entries = completions;
    setup.descriptor = Descriptor(lohan::Setup(submissions, setup.parameters));
    if (setup.descriptor.is_open()) break;
    if (errno != EINVAL) throw Refusal("io_uring_setup", errno);
  }
  if (!setup.descriptor.is_open()) throw Refusal("io_uring_setup", EINVAL);
  if ((setup.parameters.features & kFeatures) != kFeatures) {
    throw UringRefused("io_uring_setup: this kernel's io_uring is older than Linux 5.11 and lacks features");
  }
  return setup;
}

Ring::Ring(Setup setup)
    : descriptor_(std::move(setup.descriptor)),
      rings_(descriptor_.value(),
             std::max(setup.parameters.sq_off.array + setup.parameters.sq_entries * sizeof(uint32_t),
                      setup.parameters.cq_off.cqes + setup.parameters.cq_entries * sizeof(io_uring_cqe)),
             IORING_OFF_SQ_RING),
      entries_(descriptor_.value(), setup.parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
  const io_sqring_offsets& submission = setup.parameters.sq_off;
  const io_cqring_offsets& completion = setup.parameters.cq_off;
  submission_head_ = rings_.At<uint32_t>(submission.head);
  submission_tail_ = rings_.At<uint32_t>(submission.tail);
  submission_mask_ = *rings_.At<uint32_t>(submission.ring_mask);
  submission_entries_ = setup.parameters.sq_entries;
  submissions_ = entries_.At<io_uring_sqe>(0);
  completion_head_ = rings_.At<uint32_t>(completion.head);
  completion_tail_ = rings_.At<uint32_t>(completion.tail);
  completion_mask_ = *rings_.At<uint32_t>(completion.ring_mask);
  completions_ = rings_.At<io_uring_cqe>(completion.cqes);
  uint32_t* const order = rings_.At<uint32_t>(submission.array);
  for (uint32_t i = 0; i < submission_entries_; ++i) order[i] = i;
  tail_ = submitted_ = *submission_tail_;
}

bool Ring::HasRoom() const {
  return tail_ - std::atomic_ref(*submission_head_).load(std::memory_order_acquire) < submission_entries_;
}

io_uring_sqe& Ring::NextSubmission() {
  io_uring_sqe& entry = submissions_[tail_++ & submission_mask_];
  std::memset(&entry, 0, sizeof(entry));
  return entry;
}

void Ring::Enter(Wait wait, std::optional<std::chrono::steady_clock::time_point> until) {
  std::atomic_ref(*submission_tail_).store(tail_, std::memory_order_release);
  __kernel_timespec left{};
  WaitArgument argument{};
  argument.signal_mask_bytes = _NSIG / 8;
  if (until) {
    const auto duration = std::max(*until - std::chrono::steady_clock::now(), std::chrono::nanoseconds(0));
    left.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(duration).count();
    left.tv_nsec = (duration % std::chrono::seconds(1)).count();
    argument.time_limit = reinterpret_cast<uintptr_t>(&left);
  }
  const long submitted =
      syscall(SYS_io_uring_enter, descriptor_.value(), tail_ - submitted_, wait == Wait::kNo ? 0 : 1,
              IORING_ENTER_GETEVENTS | kEnterWaitLimit, &argument, sizeof(argument));
  if (submitted >= 0) {
    submitted_ += static_cast<uint32_t>(submitted);
    return;
  }
  // EAGAIN and EBUSY: the kernel lacks room until completions are taken; the caller comes back after that.
  if (errno == EINTR || errno == ETIME || errno == EAGAIN || errno == EBUSY) return;
  // Calls may be in flight into the callers' memory, and there is no way left to learn of their end: the
  // ring's thread lets this end the process.
  throw IoError("io_uring_enter", errno, "the ring", std::nullopt, "");
}

int Ring::Register(uint32_t operation, const void* argument, uint32_t count) {
  const long result = syscall(SYS_io_uring_register, descriptor_.value(), operation, argument, count);
  return result < 0 ? -errno : static_cast<int>(result);
}

}  // namespace lohan
