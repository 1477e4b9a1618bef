// What the I/O tests share: a folder of their own, patterns, and a pool that is closed with its scope.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "lohan/io.h"

namespace lohan::test {

/// A folder in the working directory (CTest's build folder, so on a disk), or elsewhere; removed with its
/// scope.
class Folder {
 public:
  explicit Folder(const std::filesystem::path& parent = std::filesystem::current_path()) {
    std::string pattern = (parent / "io_test_XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw Failure("mkdtemp failed for " + pattern);
    path_ = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

/// Random bytes that repeat after a length prime to all block sizes, beginning elsewhere for each seed: cheap
/// enough for the sanitizers, and a misplaced block differs.
inline std::vector<std::byte> Pattern(int64_t length, uint32_t seed) {
  static const std::vector<std::byte> tile = [] {
    std::mt19937 generator(1);
    std::vector<std::byte> bytes(100003);
    for (std::byte& value : bytes) value = static_cast<std::byte>(generator());
    return bytes;
  }();
  std::vector<std::byte> bytes(static_cast<size_t>(length));
  size_t from = seed * size_t{7919} % tile.size();
  for (size_t done = 0; done < bytes.size();) {
    const size_t count = std::min(tile.size() - from, bytes.size() - done);
    std::memcpy(bytes.data() + done, tile.data() + from, count);
    done += count;
    from = 0;
  }
  return bytes;
}

inline std::vector<std::byte> Contents(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::vector<std::byte> bytes(std::filesystem::file_size(path));
  stream.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!stream) throw Failure("cannot read " + path);
  return bytes;
}

inline int64_t OpenDescriptors() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

inline std::shared_ptr<FaultPlan> NewPlan() { return std::make_shared<FaultPlan>(); }

inline void WaitUntilHeld(const FaultPlan& plan, int64_t count) {
  while (plan.held() < count) std::this_thread::yield();
}

/// Makes an engine with `concurrency` calls at a time in each directory.
using EngineMaker = std::shared_ptr<IoEngine> (*)(int concurrency, std::shared_ptr<FaultPlan> faults);

using EngineTest = void (*)(EngineMaker);

template <EngineTest kBody>
void RunWithThreads() {
  kBody([](int concurrency, std::shared_ptr<FaultPlan> faults) {
    return MakeThreadEngine(concurrency, std::move(faults));
  });
}

template <EngineTest kBody>
void RunWithUring() {
  const std::string refusal = IoUringRefusal();
  if (!refusal.empty()) Skip("no io_uring here: " + refusal);
  kBody([](int concurrency, std::shared_ptr<FaultPlan> faults) {
    return MakeUringEngine(concurrency, std::move(faults));
  });
}

inline std::shared_ptr<Transfer> Start(IoEngine& engine, std::shared_ptr<File> file, Access access,
                                       int64_t offset, std::byte* memory, int64_t length,
                                       Priority priority = Priority::kNormal) {
  auto transfer = std::make_shared<Transfer>(std::move(file), access, offset, memory, length);
  engine.Submit({&transfer, 1}, priority);
  return transfer;
}

}  // namespace lohan::test

/// A test that is run with every engine; `make` makes it.
#define TEST_EACH_ENGINE(name)                                                                  \
  static void name(::lohan::test::EngineMaker make);                                            \
  static const ::lohan::test::Registration name##_threads(#name " (threads)",                   \
                                                          ::lohan::test::RunWithThreads<name>); \
  static const ::lohan::test::Registration name##_uring(#name " (io_uring)",                    \
                                                        ::lohan::test::RunWithUring<name>);     \
  static void name([[maybe_unused]] ::lohan::test::EngineMaker make)
