// What the core does when system calls fail, are short or are interrupted. This executable defines the calls
// itself: the linker binds the core to these, and each asks a script before it does the real thing.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <future>
#include <mutex>

#include "io_fixture.h"

namespace {

struct Call {
  const char* name;
  int64_t number;  // counted from 1 since the script was set
  int64_t size;
  int64_t offset;
};

/// What to do instead of the whole call: transfer at most `limit` bytes, or fail with `error_number`.
struct Verdict {
  std::optional<int64_t> limit;
  int error_number = 0;
};

std::mutex script_mutex;
std::function<Verdict(const Call&)> script;
int64_t calls = 0;

void SetScript(std::function<Verdict(const Call&)> next) {
  std::lock_guard lock(script_mutex);
  script = std::move(next);
  calls = 0;
}

Verdict Ask(const char* name, size_t size, off_t offset) {
  std::function<Verdict(const Call&)> current;
  Call call{name, 0, static_cast<int64_t>(size), offset};
  {
    std::lock_guard lock(script_mutex);
    current = script;
    call.number = ++calls;
  }
  return current ? current(call) : Verdict{};
}

template <typename Real>
long Play(const char* name, size_t size, off_t offset, Real real) {
  const Verdict verdict = Ask(name, size, offset);
  if (verdict.error_number != 0) {
    errno = verdict.error_number;
    return -1;
  }
  if (verdict.limit && *verdict.limit == 0) return 0;
  if (!verdict.limit) return real(size);
  // O_DIRECT takes whole blocks only: move at least what is reported, in whole pages.
  const auto limit = static_cast<size_t>(*verdict.limit);
  return std::min(real(std::min(size, (limit + 4095) / 4096 * 4096)), static_cast<long>(limit));
}

}  // namespace

extern "C" {
ssize_t pread(int descriptor, void* memory, size_t size, off_t offset) {
  return Play("pread", size, offset,
              [=](size_t n) { return syscall(SYS_pread64, descriptor, memory, n, offset); });
}
ssize_t pwrite(int descriptor, const void* memory, size_t size, off_t offset) {
  return Play("pwrite", size, offset,
              [=](size_t n) { return syscall(SYS_pwrite64, descriptor, memory, n, offset); });
}
int fallocate(int descriptor, int mode, off_t offset, off_t length) {
  return static_cast<int>(Play("fallocate", static_cast<size_t>(length), offset, [=](size_t n) {
    return syscall(SYS_fallocate, descriptor, mode, offset, n);
  }));
}
int fdatasync(int descriptor) {
  return static_cast<int>(
      Play("fdatasync", 1, 0, [=](size_t) { return syscall(SYS_fdatasync, descriptor); }));
}
}

namespace lohan {
namespace {

using test::Contents;
using test::Folder;
using test::Pattern;
using test::Start;

constexpr int64_t kMib = int64_t{1} << 20;

/// Ends the script with its scope, also when a check fails.
struct Script {
  explicit Script(std::function<Verdict(const Call&)> next) { SetScript(std::move(next)); }
  ~Script() { SetScript({}); }
};

bool Is(const Call& call, const char* name) { return std::string(call.name) == name; }

void RoundTrip(const std::function<Verdict(const Call&)>& next) {
  Folder folder;
  const int64_t size = 5 * kMib + 777;
  auto file = File::Open(folder.File("data"), size);
  auto engine = MakeThreadEngine(2);
  std::vector<std::byte> source = Pattern(size, 11);
  std::vector<std::byte> target(source.size());
  {
    Script running(next);
    Start(*engine, file, Access::kWrite, 0, source.data(), size)->Wait();
    CHECK(Contents(folder.File("data")) == source);
    Start(*engine, file, Access::kRead, 3, target.data(), size - 3)->Wait();
  }
  CHECK(std::equal(source.begin() + 3, source.end(), target.begin()));
}

TEST(InterruptedCallsAreRepeated) {
  RoundTrip([](const Call& call) { return Verdict{{}, call.number % 3 != 0 ? EINTR : 0}; });
}

TEST(ShortCallsAreCompleted) {
  RoundTrip([](const Call& call) {
    return Verdict{call.size > 70000 ? std::optional<int64_t>(65536) : std::nullopt};
  });
}

TEST(ShortCallsThatLeaveTheAlignmentAreRealigned) {
  RoundTrip([](const Call& call) {
    return Verdict{call.size > 100000 ? std::optional<int64_t>(99999) : std::nullopt};
  });
}

TEST(WritesOfLessThanABlockForEverAreAnError) {
  Folder folder;
  auto file = File::Open(folder.File("stalled"), kMib);
  if (!file->direct()) test::Skip("no direct I/O here: " + file->direct_refusal());
  auto engine = MakeThreadEngine(1);
  AlignedBuffer memory(kMib);
  Script running([](const Call&) { return Verdict{100}; });
  const auto error = CHECK_THROWS(IoError, "less than one block",
                                  Start(*engine, file, Access::kWrite, 0, memory.data(), kMib)->Wait());
  CHECK_EQUAL(error.error_number(), EIO);
}

TEST(TheNthCallFailingIsReportedAtItsPlaceAndNothingElseIsLost) {
  Folder folder;
  const int64_t chunk = 4 * kMib;
  const int64_t chunks = 6;
  auto file = File::Open(folder.File("chunks"), chunk * chunks);
  auto engine = MakeThreadEngine(1);
  AlignedBuffer memory(chunk * chunks);
  const int64_t failures[] = {EIO, ENOSPC, EDQUOT, EFBIG};
  for (int64_t n = 1; n <= chunks; ++n) {
    const std::vector<std::byte> source = Pattern(chunk * chunks, static_cast<uint32_t>(n));
    std::copy(source.begin(), source.end(), memory.data());
    const int error_number = static_cast<int>(failures[n % 4]);
    int64_t failed_at = -1;
    {
      Script running([&](const Call& call) {
        if (call.number != n) return Verdict{};
        failed_at = call.offset;
        return Verdict{{}, error_number};
      });
      std::vector<std::shared_ptr<Transfer>> transfers;
      for (int64_t i = 0; i < chunks; ++i) {
        transfers.push_back(
            Start(*engine, file, Access::kWrite, i * chunk, memory.data() + i * chunk, chunk));
      }
      for (int64_t i = 0; i < chunks; ++i) {
        if (i != n - 1) {
          transfers[static_cast<size_t>(i)]->Wait();
          continue;
        }
        const auto error = CHECK_THROWS(IoError, "write of ", transfers[static_cast<size_t>(i)]->Wait());
        CHECK_EQUAL(error.error_number(), error_number);
        CHECK_EQUAL(error.offset().value(), failed_at);
        CHECK_EQUAL(error.path(), folder.File("chunks"));
      }
    }
    CHECK_EQUAL(failed_at, (n - 1) * chunk);
    const std::vector<std::byte> written = Contents(folder.File("chunks"));
    for (int64_t i = 0; i < chunks; ++i) {
      if (i != n - 1) {
        CHECK(std::equal(written.begin() + i * chunk, written.begin() + (i + 1) * chunk,
                         source.begin() + i * chunk));
      }
    }
  }
}

TEST(OfSeveralFailedPiecesTheFirstInTheFileIsReported) {
  Folder folder;
  auto file = File::Open(folder.File("pieces"), 16 * kMib);
  auto engine = MakeThreadEngine(3);
  AlignedBuffer memory(16 * kMib);
  Script running([](const Call& call) { return Verdict{{}, call.offset >= 4 * kMib ? EIO : 0}; });
  auto transfer = Start(*engine, file, Access::kRead, 0, memory.data(), 16 * kMib);
  CHECK_EQUAL(CHECK_THROWS(IoError, "read of", transfer->Wait()).offset().value(), 4 * kMib);
}

TEST(AFullDiskRemovesTheFileItCouldNotAllocate) {
  Folder folder;
  const auto full = [](const Call& call) { return Verdict{{}, Is(call, "fallocate") ? ENOSPC : 0}; };
  Script running(full);
  const auto error = CHECK_THROWS(IoError, "No space left", File::Open(folder.File("new"), kMib));
  CHECK_EQUAL(error.operation(), std::string("allocate"));
  CHECK(!std::filesystem::exists(folder.File("new")));
  SetScript({});
  File::Open(folder.File("old"), 4096);
  SetScript(full);
  CHECK_THROWS(IoError, "No space left", File::Open(folder.File("old"), kMib));
  CHECK_EQUAL(std::filesystem::file_size(folder.File("old")), 4096u);
}

TEST(AFilesystemWithoutAllocationStillGetsTheSize) {
  Folder folder;
  Script running([](const Call& call) { return Verdict{{}, Is(call, "fallocate") ? EOPNOTSUPP : 0}; });
  CHECK_EQUAL(File::Open(folder.File("sparse"), kMib)->size_bytes(), kMib);
}

TEST(ARefusedDirectTransferFallsBackAndKeepsTheReason) {
  Folder folder;
  Script running([](const Call& call) { return Verdict{{}, Is(call, "pread") ? EINVAL : 0}; });
  const auto file = File::Open(folder.File("refused"), kMib);
  CHECK(!file->direct());
  CHECK(file->direct_refusal().find("refuses O_DIRECT") != std::string::npos);
  CHECK_EQUAL(file->alignment_bytes(), 1);
}

TEST(AFailedSyncIsReported) {
  Folder folder;
  auto file = File::Open(folder.File("sync"), kMib);
  Script running([](const Call& call) { return Verdict{{}, Is(call, "fdatasync") ? EIO : 0}; });
  CHECK_EQUAL(CHECK_THROWS(IoError, "sync of", file->Sync()).error_number(), EIO);
}

/// Holds the first call back until Open, so that what is queued behind it is known.
class Gate {
 public:
  void Pass(const Call& call) {
    if (call.number == 1) {
      arrived_.set_value();
      opened_.get_future().wait();
    }
  }
  void WaitForArrival() { arrived_.get_future().wait(); }
  void Open() { opened_.set_value(); }

 private:
  std::promise<void> arrived_;
  std::promise<void> opened_;
};

TEST(UrgentTransfersOvertakeNormalOnes) {
  Folder folder;
  auto file = File::Open(folder.File("order"), 64 * 4096);
  auto engine = MakeThreadEngine(1);
  AlignedBuffer memory(64 * 4096);
  Gate gate;
  std::mutex mutex;
  std::vector<int64_t> order;
  Script running([&](const Call& call) {
    gate.Pass(call);
    std::lock_guard lock(mutex);
    order.push_back(call.offset / 4096);
    return Verdict{};
  });
  std::vector<std::shared_ptr<Transfer>> transfers;
  const auto start = [&](int64_t page, Priority priority) {
    transfers.push_back(
        Start(*engine, file, Access::kRead, page * 4096, memory.data() + page * 4096, 4096, priority));
  };
  start(0, Priority::kNormal);
  gate.WaitForArrival();
  start(1, Priority::kNormal);
  start(2, Priority::kNormal);
  start(3, Priority::kUrgent);
  start(4, Priority::kUrgent);
  gate.Open();
  for (const auto& transfer : transfers) transfer->Wait();
  CHECK(order == (std::vector<int64_t>{0, 3, 4, 1, 2}));
}

TEST(ClosingWithTransfersInFlightCompletesThem) {
  Folder folder;
  auto file = File::Open(folder.File("in_flight"), 8 * kMib);
  auto engine = MakeThreadEngine(1);
  std::vector<std::byte> source = Pattern(8 * kMib, 12);
  Gate gate;
  Script running([&](const Call& call) {
    gate.Pass(call);
    return Verdict{};
  });
  auto transfer = Start(*engine, file, Access::kWrite, 0, source.data(), 8 * kMib);
  gate.WaitForArrival();
  CHECK(!transfer->Done());
  // Neither the file nor the pool may end before the held-back write has.
  auto file_closed = std::async(std::launch::async, [&] { file->Close(); });
  auto pool_closed = std::async(std::launch::async, [&] { engine->Close(); });
  gate.Open();
  transfer->Wait();
  file_closed.get();
  pool_closed.get();
  CHECK(Contents(folder.File("in_flight")) == source);
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
