// Reads and writes of real files on whatever filesystem the build folder lies.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>

#include "direct_alignment.h"
#include "io_fixture.h"

namespace lohan {
namespace {

using test::Contents;
using test::Folder;
using test::Pattern;
using test::Start;

constexpr int64_t kMib = int64_t{1} << 20;

/// What is on it is in memory, on every Linux.
constexpr const char* kInMemory = "/dev/shm";

void CheckRangesThatStraddleAlignment(IoEngine& engine, const Folder& folder) {
  const int64_t size = 6 * kMib + 123;
  auto file = File::Open(folder.File("grid"), size);
  std::vector<std::byte> model = Pattern(size, 1);
  Start(engine, file, Access::kWrite, 0, model.data(), size)->Wait();
  AlignedBuffer memory(5 * kMib);
  uint32_t seed = 2;
  for (const int64_t offset : {int64_t{0}, int64_t{1}, int64_t{511}, int64_t{512}, int64_t{4095},
                               int64_t{4096}, int64_t{4097}, kMib - 1, size - 4096 - 123, size - 1}) {
    for (int64_t length :
         {int64_t{0}, int64_t{1}, int64_t{511}, int64_t{512}, int64_t{513}, int64_t{4095}, int64_t{4096},
          int64_t{4097}, int64_t{8191}, int64_t{8193}, kMib, 4 * kMib + 4097}) {
      length = std::min(length, size - offset);
      for (const int64_t shift : {0, 1, 512}) {
        const std::vector<std::byte> bytes = Pattern(length, seed++);
        std::byte* const at = memory.data() + shift;
        std::copy(bytes.begin(), bytes.end(), at);
        Start(engine, file, Access::kWrite, offset, at, length)->Wait();
        std::copy(bytes.begin(), bytes.end(), model.begin() + offset);
        std::memset(memory.data(), 0, static_cast<size_t>(memory.size_bytes()));
        Start(engine, file, Access::kRead, offset, at, length)->Wait();
        CHECK(std::equal(bytes.begin(), bytes.end(), at));
      }
    }
    CHECK(Contents(folder.File("grid")) == model);
  }
}

TEST_EACH_ENGINE(RangesThatStraddleAlignmentRoundTripAndTouchNothingElse) {
  auto engine = make(3, nullptr);
  CheckRangesThatStraddleAlignment(*engine, Folder());
  CheckRangesThatStraddleAlignment(*engine, Folder(kInMemory));
}

void CheckConcurrentNeighbours(IoEngine& engine, const Folder& folder) {
  const std::vector<std::byte> model = Pattern(3 * kMib, 3);
  auto file = File::Open(folder.File("neighbours"), 3 * kMib);
  std::vector<std::byte> source = model;
  for (const int64_t step : {int64_t{1000}, int64_t{5000}, int64_t{4096}, int64_t{70001}}) {
    std::vector<std::shared_ptr<Transfer>> transfers;
    for (int64_t offset = 0; offset < 3 * kMib; offset += step) {
      const int64_t length = std::min(step, 3 * kMib - offset);
      transfers.push_back(Start(engine, file, Access::kWrite, offset, source.data() + offset, length));
    }
    for (const auto& transfer : transfers) transfer->Wait();
    CHECK(Contents(folder.File("neighbours")) == model);
  }
}

TEST_EACH_ENGINE(ConcurrentNeighboursOfOddSizesKeepTheirBytes) {
  auto engine = make(4, nullptr);
  CheckConcurrentNeighbours(*engine, Folder());
  CheckConcurrentNeighbours(*engine, Folder(kInMemory));
}

// A mapping answers with SIGBUS where a page cannot be had, which a write never does.
TEST_EACH_ENGINE(FilesInMemoryMayBeSparseOrLosePagesWhileTheyAreOpen) {
  Folder folder(kInMemory);
  const std::string path = folder.File("holes");
  auto engine = make(2, nullptr);
  std::vector<std::byte> bytes = Pattern(kMib, 8);
  std::ofstream(path).close();
  std::filesystem::resize_file(path, 3 * kMib);  // allocates nothing
  const auto sparse = File::Open(path, std::nullopt);
  CHECK(!sparse->direct());
  Start(*engine, sparse, Access::kWrite, kMib, bytes.data(), kMib)->Wait();
  std::vector<std::byte> expected(static_cast<size_t>(3 * kMib));
  std::copy(bytes.begin(), bytes.end(), expected.begin() + kMib);
  CHECK(Contents(path) == expected);

  const std::string cut = folder.File("cut");
  const auto whole = File::Open(cut, 2 * kMib);
  std::filesystem::resize_file(cut, kMib / 2);
  Start(*engine, whole, Access::kWrite, kMib, bytes.data(), kMib)->Wait();  // lengthens it, as on a drive
  expected.assign(static_cast<size_t>(2 * kMib), std::byte{});
  std::copy(bytes.begin(), bytes.end(), expected.begin() + kMib);
  CHECK(Contents(cut) == expected);
}

TEST_EACH_ENGINE(SizeBytesCreatesAllocatesResizesAndKeepsContents) {
  Folder folder;
  const std::string path = folder.File("sized");
  CHECK_EQUAL(File::Open(path, 3 * kMib)->size_bytes(), 3 * kMib);
  struct stat status{};
  CHECK_EQUAL(stat(path.c_str(), &status), 0);
  CHECK_EQUAL(status.st_mode & 0777, 0600u);
  std::byte value{7};
  auto engine = make(1, nullptr);
  Start(*engine, File::Open(path, std::nullopt), Access::kWrite, 10, &value, 1)->Wait();
  CHECK_EQUAL(File::Open(path, kMib)->size_bytes(), kMib);
  CHECK(Contents(path)[10] == std::byte{7});
  CHECK_EQUAL(File::Open(path, 0)->size_bytes(), 0);
  CHECK_EQUAL(File::Open(path, std::nullopt)->size_bytes(), 0);
}

TEST(APathWithoutAFolderLiesInTheWorkingOne) {
  Folder folder;
  const std::string name = std::filesystem::path(folder.File("")).parent_path().filename().string();
  std::filesystem::current_path(folder.File(""));
  const auto relative = File::Open("file", 1);
  std::filesystem::current_path("..");
  std::byte value{};
  const auto within_folder = File::Open(name + "/file", 1);
  CHECK(relative->Cut(0, &value, 1).front().file->directory() ==
        within_folder->Cut(0, &value, 1).front().file->directory());
}

TEST(DirectIsUsedOrTheReasonIsKept) {
  Folder folder;
  const auto file = File::Open(folder.File("direct"), kMib);
  CHECK_EQUAL(file->direct(), file->direct_refusal().empty());
  CHECK_EQUAL(file->alignment_bytes() % (file->direct() ? PageBytes() : 1), 0);
  if (!file->direct()) test::Skip("no direct I/O here: " + file->direct_refusal());
}

TEST(TheAlignmentThatStatxTellsIsTaken) {
  Folder folder;
  const auto file = File::Open(folder.File("aligned"), kMib);
  const Descriptor direct(open(folder.File("aligned").c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC));
  if (!direct.is_open()) test::Skip("no direct I/O here: " + file->direct_refusal());
  const std::optional<DirectAlignment> told = AskDirectAlignment(direct.value());
  if (!told) test::Skip("this kernel or filesystem does not tell by statx(STATX_DIOALIGN)");
  CHECK_EQUAL(file->direct(), told->offset_bytes > 0);
  CHECK_EQUAL(file->alignment_bytes(), std::max(PageBytes(), told->offset_bytes));
  // A read at the least alignment that was told works, in offset, length and memory.
  AlignedBuffer memory(kMib);
  const auto length = static_cast<size_t>(told->offset_bytes);
  CHECK_EQUAL(pread(direct.value(), memory.data() + told->memory_bytes, length, told->offset_bytes),
              told->offset_bytes);
}

TEST(MissingFilesFoldersAndRangesAreRefusedWithTheirPlace) {
  Folder folder;
  const auto missing =
      CHECK_THROWS(IoError, "No such file", File::Open(folder.File("missing"), std::nullopt));
  CHECK_EQUAL(missing.error_number(), ENOENT);
  CHECK_EQUAL(missing.operation(), std::string("open"));
  CHECK_EQUAL(missing.path(), folder.File("missing"));
  CHECK(!missing.offset());
  CHECK_EQUAL(
      CHECK_THROWS(IoError, "Is a directory", File::Open(folder.File(""), std::nullopt)).error_number(),
      EISDIR);
  CHECK_THROWS(std::invalid_argument, "not a regular file", File::Open("/dev/null", std::nullopt));
  CHECK_THROWS(std::invalid_argument, "size_bytes is -1", File::Open(folder.File("negative"), -1));
  auto file = File::Open(folder.File("small"), 100);
  std::byte memory[200] = {};
  CHECK_THROWS(std::invalid_argument, "not within", Transfer(file, Access::kRead, 1, memory, 100));
  CHECK_THROWS(std::invalid_argument, "not within", Transfer(file, Access::kWrite, -1, memory, 1));
  CHECK_THROWS(std::invalid_argument, "not within",
               Transfer(file, Access::kWrite, std::numeric_limits<int64_t>::max(), memory, 1));
}

TEST_EACH_ENGINE(AFileThatShrankIsReportedWhereItEnds) {
  Folder folder;
  auto engine = make(2, nullptr);
  AlignedBuffer memory(5 * kMib);
  for (const int64_t beyond_the_block : {0, 100}) {
    auto file = File::Open(folder.File("shrunk"), 5 * kMib);
    CHECK_EQUAL(truncate(folder.File("shrunk").c_str(), 2 * kMib + beyond_the_block), 0);
    auto transfer = Start(*engine, file, Access::kRead, 0, memory.data(), 5 * kMib);
    const auto error = CHECK_THROWS(IoError, "ends early", transfer->Wait());
    CHECK_EQUAL(error.error_number(), ENODATA);
    CHECK_EQUAL(error.offset().value() / PageBytes() * PageBytes(), 2 * kMib);
  }
}

TEST_EACH_ENGINE(ClosedFilesAndPoolsSaySo) {
  Folder folder;
  auto file = File::Open(folder.File("closed"), kMib);
  auto engine = make(2, nullptr);
  AlignedBuffer memory(kMib);
  auto transfer = Start(*engine, file, Access::kWrite, 0, memory.data(), kMib);
  engine->Close();
  engine->Close();
  CHECK(transfer->Done());
  transfer->Wait();
  CHECK_THROWS(std::runtime_error, "the I/O pool is closed",
               Start(*engine, file, Access::kRead, 0, memory.data(), kMib));
  CHECK_THROWS(std::runtime_error, "the I/O pool is closed", engine->CheckUsable());
  file->Close();
  file->Close();
  CHECK_THROWS(std::invalid_argument, "is closed", Transfer(file, Access::kRead, 0, memory.data(), 1));
  CHECK_THROWS(std::invalid_argument, "is closed", file->Sync());
}

TEST_EACH_ENGINE(DescriptorsDoNotGrow) {
  Folder folder;
  auto engine = make(2, nullptr);
  AlignedBuffer memory(8192);
  const int64_t before = test::OpenDescriptors();
  for (int round = 0; round < 200; ++round) {
    auto file = File::Open(folder.File("descriptors"), 8192);
    Start(*engine, file, Access::kWrite, 1, memory.data(), 8000)->Wait();
    CHECK_THROWS(IoError, "No such file", File::Open(folder.File("missing"), std::nullopt));
    if (round % 2 == 0) file->Close();
  }
  CHECK_EQUAL(test::OpenDescriptors(), before);
}

TEST_EACH_ENGINE(ManyThreadsShareAPool) {
  Folder folder;
  auto engine = make(3, nullptr);
  auto file = File::Open(folder.File("shared"), 4 * kMib);
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint32_t round = 0; round < 30; ++round) {
        std::vector<std::byte> bytes = Pattern(100000, round + 1000 * static_cast<uint32_t>(thread));
        std::vector<std::byte> read(bytes.size());
        const auto length = static_cast<int64_t>(bytes.size());
        Start(*engine, file, Access::kWrite, thread * kMib, bytes.data(), length)->Wait();
        Start(*engine, file, Access::kRead, thread * kMib, read.data(), length, Priority::kUrgent)->Wait();
        if (read != bytes) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(wrong.load(), 0);
}

TEST_EACH_ENGINE(AForkedChildGetsAnErrorAndEnds) {
  Folder folder;
  auto engine = make(2, nullptr);
  auto file = File::Open(folder.File("forked"), kMib);
  AlignedBuffer memory(kMib);
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      Start(*engine, file, Access::kRead, 0, memory.data(), kMib);
    } catch (const std::runtime_error&) {
      code = 0;
    }
    engine.reset();  // must not wait for threads that do not exist
    file.reset();
    _exit(code);
  }
  int status = 0;
  CHECK_EQUAL(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQUAL(WEXITSTATUS(status), 0);
  Start(*engine, file, Access::kRead, 0, memory.data(), kMib)->Wait();
}

}  // namespace
}  // namespace lohan

int main() { return lohan::test::RunAll(); }
