// The operations that wait for an engine, by directory and priority.
#pragma once

#include <deque>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lohan/io.h"
#include "operation.h"

namespace lohan {

using OperationPointer = std::unique_ptr<Operation>;

/// First in, first out, urgent ones first.
class OperationQueue {
 public:
  bool empty() const { return urgent_.empty() && normal_.empty(); }

  void Push(OperationPointer operation, Priority priority) {
    (priority == Priority::kUrgent ? urgent_ : normal_).push_back(std::move(operation));
  }

  /// What Pop will return; the queue must not be empty, here and there.
  const Operation& front() const { return *(urgent_.empty() ? normal_ : urgent_).front(); }

  OperationPointer Pop() {
    std::deque<OperationPointer>& from = urgent_.empty() ? normal_ : urgent_;
    OperationPointer operation = std::move(from.front());
    from.pop_front();
    return operation;
  }

 private:
  std::deque<OperationPointer> urgent_;
  std::deque<OperationPointer> normal_;
};

/// The operations of a batch, one for each extent. Made before an engine's lock is taken.
inline std::vector<OperationPointer> MakeOperations(std::span<const std::shared_ptr<Transfer>> transfers,
                                                    const std::shared_ptr<FaultPlan>& faults) {
  std::vector<OperationPointer> operations;
  for (const std::shared_ptr<Transfer>& transfer : transfers) {
    for (size_t i = 0; i < transfer->extents().size(); ++i) {
      operations.push_back(std::make_unique<Operation>(transfer, i, faults));
    }
  }
  return operations;
}

}  // namespace lohan
