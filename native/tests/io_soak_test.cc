// Many small operations: descriptors stay as they are, and memory does not grow. 100,000 for each engine, or
// LOHAN_SOAK_OPERATIONS; `make test-native-soak` runs a million.
#include <malloc.h>

#include <cstdlib>
#include <span>

#include "io_fixture.h"

namespace lohan {
namespace {

using test::Folder;
using test::Pattern;

constexpr int64_t kBlock = 4096;
constexpr int64_t kBlocks = 64;
constexpr int64_t kRounds = 20;

int64_t Operations() {
  const char* const wanted = std::getenv("LOHAN_SOAK_OPERATIONS");
  return wanted == nullptr ? 100'000 : std::atoll(wanted);
}

/// Bytes that malloc has handed out. The sanitizers' allocators do not count, and find leaks themselves.
int64_t AllocatedBytes() {
  const struct mallinfo2 now = mallinfo2();
  return static_cast<int64_t>(now.uordblks + now.hblkhd);
}

/// Bytes of anonymous and file mappings, from /proc/self/status.
int64_t MappedBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmSize:")) return std::stoll(line.substr(7)) * 1024;
  }
  throw test::Failure("/proc/self/status has no VmSize");
}

/// Reads and writes of one block each, in batches and one by one, in turn; every seventh is unaligned.
void Round(IoEngine& engine, const std::shared_ptr<File>& file, AlignedBuffer& memory, int64_t operations) {
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (int64_t done = 0; done < operations; done += kBlocks) {
    const Access access = done / kBlocks % 4 == 0 ? Access::kWrite : Access::kRead;
    for (int64_t i = 0; i < kBlocks; ++i) {
      const int64_t shift = i % 7 == 6 ? 1 : 0;
      transfers.push_back(std::make_shared<Transfer>(file, access, i * kBlock,
                                                     memory.data() + i * kBlock + shift, kBlock - shift));
    }
    const std::span all(transfers);
    engine.Submit(all.first(kBlocks / 2), Priority::kNormal);
    for (size_t i = kBlocks / 2; i < kBlocks; ++i) engine.Submit(all.subspan(i, 1), Priority::kUrgent);
    for (const auto& transfer : transfers) transfer->Wait();
    transfers.clear();
  }
}

TEST_EACH_ENGINE(SmallOperationsLeaveNothingBehind) {
  const int64_t per_round = (Operations() + kRounds - 1) / kRounds;
  Folder folder;
  auto engine = make(8, nullptr);
  auto file = File::Open(folder.File("soak"), kBlocks * kBlock);
  AlignedBuffer memory(kBlocks * kBlock);
  Round(*engine, file, memory, per_round);  // after this everything that is made once is made
  const int64_t descriptors = test::OpenDescriptors();
  const int64_t allocated = AllocatedBytes();
  const int64_t mapped = MappedBytes();
  for (int64_t round = 1; round < kRounds; ++round) {
    Round(*engine, file, memory, per_round);
    CHECK_EQUAL(test::OpenDescriptors(), descriptors);
  }
  // A leak of one byte for each operation would show: what may differ is how full the workers' queues and
  // vectors, and malloc's caches for each thread, happen to be.
  CHECK(AllocatedBytes() - allocated < 64 * 1024);
  CHECK(MappedBytes() - mapped < int64_t{1} << 20);
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
