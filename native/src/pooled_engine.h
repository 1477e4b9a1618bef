// What every engine does alike: refuse after Close and in a forked child, and end safely in both.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>

#include "lohan/io.h"

namespace lohan {

constexpr const char* kPoolName = "the I/O pool";

/// An engine around `Workers`, which have the threads: Submit, Close, CheckOpen, RegisterMemory and
/// UnregisterMemory are theirs.
template <typename Workers, EngineKind kKind>
class PooledEngine : public IoEngine {
 public:
  explicit PooledEngine(std::unique_ptr<Workers> workers) : workers_(std::move(workers)) {}

  ~PooledEngine() override {
    // In a forked child there is nobody to wait for and the mutex may be held for ever.
    if (owner_.IsCurrent()) {
      workers_->Close();
    } else {
      static_cast<void>(workers_.release());
    }
  }

  EngineKind kind() const override { return kKind; }

  void Submit(std::span<const std::shared_ptr<Transfer>> transfers, Priority priority) override {
    owner_.Check(kPoolName);
    workers_->Submit(transfers, priority);
  }

  void Close() override {
    owner_.Check(kPoolName);
    workers_->Close();
  }

  void CheckUsable() const override {
    owner_.Check(kPoolName);
    workers_->CheckOpen();
  }

  const OwningProcess& owner() const override { return owner_; }

  Registration RegisterMemory(std::byte* memory, int64_t size_bytes) override {
    owner_.Check(kPoolName);
    return workers_->RegisterMemory(memory, size_bytes);
  }

  void UnregisterMemory(const Registration& registration) noexcept override {
    if (owner_.IsCurrent()) workers_->UnregisterMemory(registration);
  }

 private:
  OwningProcess owner_;
  std::unique_ptr<Workers> workers_;
};

}  // namespace lohan
