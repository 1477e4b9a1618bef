"""
The native core: AdamW on the CPU, aligned memory, checksums, and parallel direct file I/O.
"""

from collections.abc import Callable, Iterable, Sequence
import enum
import os
from typing import Any


class AlignedBuffer:
    """
    Zero-filled host memory, page aligned, advised to use huge pages from 2 MiB on.

    On a machine with several NUMA nodes it is spread over them from that size on. The mapping has
    exactly the size asked for, rounded up to a page. It is given back when the
    buffer and the last view of it are gone. A forked child sees zeros in it.
    """

    def __init__(self, size_bytes: int) -> None:
        """
        Map `size_bytes` bytes. Raises ValueError below 1, MemoryError when the system refuses.
        """

    @property
    def size_bytes(self) -> int:
        """Usable size in bytes: the size asked for."""

    @property
    def address(self) -> int:
        """Address of the first byte, a multiple of the page size."""

    def array(self) -> Any:
        """
        The memory as a 1-D uint8 array that keeps it alive: `torch.from_dlpack(buffer.array())`.

        The array has `__dlpack__` and the buffer protocol.
        """

class ThreadPool:
    """
    Worker threads for the compute kernels, on the CPUs of the maker's affinity mask.

    They give way to the process's other threads. Calls from several threads take turns. Using it in a forked
    child raises RuntimeError.
    """

    def __init__(self, threads: int = 0) -> None:
        """
        Start `threads` workers; 0 starts one per CPU in the affinity mask.

        Raises ValueError outside 0..1024.
        """

    @property
    def threads(self) -> int:
        """Number of workers."""

class AdamSegment:
    """Consecutive elements that share hyper-parameters and step count."""

    def __init__(self, offset: int, length: int, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, step: int) -> None:
        """
        Elements [offset, offset + length).

        Raises ValueError for a value that torch.optim.AdamW would not take.
        """

    @property
    def offset(self) -> int:
        """First element."""

    @property
    def length(self) -> int:
        """Number of elements."""

    @property
    def learning_rate(self) -> float: ...

    @property
    def beta1(self) -> float: ...

    @property
    def beta2(self) -> float: ...

    @property
    def epsilon(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def step(self) -> int:
        """Number of this update, counted from 1."""

class UpdateResult:
    """What a pass saw of the gradients, after scaling."""

    @property
    def squared_norm(self) -> float:
        """
        Sum of squares in float64, in an order that depends on nothing but the number of elements.
        """

    @property
    def non_finite(self) -> int:
        """Number of infinite or NaN elements."""

class InstructionSet(enum.Enum):
    """Which build of the kernels runs; all give the same bits."""

    AUTO = 0
    """The widest one available."""

    PORTABLE = 1

    AVX2 = 2

    AVX512 = 3

class MomentCode(enum.Enum):
    """Which of the two moments 8-bit codes stand for."""

    FIRST = 0

    SECOND = 1

def available_instruction_sets() -> list[InstructionSet]:
    """The instruction sets this processor can run, narrowest first."""

class AdamState:
    """
    The arrays of an AdamW state: 1-D, contiguous, writable, in host memory, disjoint.

    Master weights are float32 `master`, with `weights` as an optional bfloat16 copy (rounded to nearest even), or
    split: bfloat16 `weights` and int16 `remainder` (see `split_master`). Moments are float32, or uint8 codes with
    float32 scales, one per 256 elements; the second moment is coded by its square root. Zero-filled arrays are
    zero moments in both forms. The object keeps the arrays alive.
    """

    def __init__(self, *, first_moment: object, second_moment: object, master: object | None = None, weights: object | None = None, remainder: object | None = None, first_scales: object | None = None, second_scales: object | None = None) -> None:
        """
        Raises TypeError for a wrong element type, ValueError for arrays that make no state.
        """

    @property
    def length(self) -> int:
        """Number of elements."""

def adamw_update(segments: Sequence[AdamSegment], gradients: object, state: AdamState, *, out: AdamState | None = None, gradient_scale: float = 1.0, pool: ThreadPool, instruction_set: InstructionSet = InstructionSet.AUTO) -> UpdateResult:
    """
    One step of AdamW, computed as torch.optim.AdamW does.

    `gradients` are float32 or bfloat16, 1-D, contiguous, in host memory and as long as the state; they are
    multiplied by `gradient_scale` first. The new state goes to `out`, which has the state's form and shares no
    memory with it, or in place; to `out` fastest where its arrays begin at multiples of 64 bytes. Elements outside the segments are not touched and count to nothing; with 8-bit
    moments each segment begins at a multiple of 256, past the last block of the one before. Releases the GIL.

    Raises TypeError for a wrong element type, ValueError for arrays or segments that do not fit together.
    """

def gradient_norm(gradients: object, *, gradient_scale: float = 1.0, pool: ThreadPool, instruction_set: InstructionSet = InstructionSet.AUTO) -> UpdateResult:
    """
    Squared norm and non-finite count of all elements.

    Equal to adamw_update's, bit for bit, when its segments cover the arrays.
    """

def split_master(master: object, weights: object, remainder: object, *, pool: ThreadPool, instruction_set: InstructionSet = InstructionSet.AUTO) -> None:
    """
    Write float32 `master` as bfloat16 `weights` and int16 `remainder`.

    The value's bits are (weights << 16) + remainder: `weights` is the nearest bfloat16, ties away from zero, and
    nothing is lost; a NaN becomes the canonical one. 1-D arrays of one length that share no memory.
    """

def join_master(weights: object, remainder: object, master: object, *, pool: ThreadPool, instruction_set: InstructionSet = InstructionSet.AUTO) -> None:
    """The reverse of `split_master`."""

def decode_moment(code: MomentCode, codes: object, scales: object, moments: object, *, pool: ThreadPool, instruction_set: InstructionSet = InstructionSet.AUTO) -> None:
    """
    Write the float32 values that 8-bit `codes` with one scale per 256 elements stand for.

    With MomentCode.SECOND these are the second moments themselves, not the coded square roots.
    """

def read_modify_write(a: object, b: object, c: object, source: object, *, pool: ThreadPool, instruction_set: InstructionSet = InstructionSet.AUTO) -> None:
    """
    Add `source` to `a`, `b` and `c`, all float32: 28 bytes of memory traffic an element.

    The reference for an update's speed: its own pattern of streams with nothing to compute.
    """

def checksum(array: object, *, pool: ThreadPool) -> int:
    """
    CRC-32C (Castagnoli, RFC 3720) of the bytes of a 1-D contiguous host array of any element type.

    The standard value, whatever the number of threads; 0 for an empty array. Releases the GIL.

    Raises TypeError for what is no array, ValueError for one that cannot be used.
    """

def copy_with_checksum(target: object, source: object, *, pool: ThreadPool) -> int:
    """
    Copy the bytes of `source` to `target` and return the CRC-32C of what `target` then holds.

    Both are 1-D contiguous host arrays of equal size in bytes; element types may differ. One pass over
    memory: tiles of 256 KiB are summed while they lie in the cache. Releases the GIL.

    Raises TypeError for what is no array, ValueError for sizes that differ, memory that overlaps, or an array
    that cannot be used.
    """

class IoErrorKind(enum.Enum):
    """The failures of a drive that are treated differently."""

    DEVICE = 0
    """EIO: the drive reported an error."""

    NO_SPACE = 1
    """ENOSPC: the file system is full."""

    QUOTA = 2
    """EDQUOT: the user's quota is used up."""

    FILE_TOO_LARGE = 3
    """EFBIG: the file system, or `ulimit -f`, allows no such size."""

    OTHER = 4
    """Anything else; `errno` says what."""

class IoError(OSError):
    """
    A file operation failed; `errno` and `filename` are set as in every OSError.
    """

    @property
    def offset(self) -> int | None:
        """
        Where in the file `filename` the transfer failed, in bytes; None if none did.
        """

    @property
    def operation(self) -> str:
        """What failed: "open", "allocate", "read", "write", "sync" and so on."""

    @property
    def kind(self) -> IoErrorKind:
        """`errno`, as far as it matters."""

    @property
    def remedy(self) -> str:
        """What a user can do about it: one sentence."""

class FaultPlan:
    """
    Faults for tests: which operations of a pool go wrong, and how.

    An operation is one read or write call of up to 4 MiB; a repeated call counts again. Each rule counts the
    operations on paths that begin with `path_prefix`, from 1 on since the rule was made, and strikes `count`
    of them from the `nth` on. All engines are struck alike. Values below 1 raise ValueError.
    """

    def __init__(self) -> None: ...

    def fail(self, nth: int, error_number: int, *, count: int = 1, path_prefix: str | os.PathLike[str] = '') -> None:
        """Fail with this errno; the pool repeats EINTR and EAGAIN."""

    def shorten(self, nth: int, missing_bytes: int, *, count: int = 1, path_prefix: str | os.PathLike[str] = '') -> None:
        """
        Move this many bytes less than asked for, but at least one; the pool goes on from there.
        """

    def slow(self, nth: int, seconds: float, *, count: int = 1, path_prefix: str | os.PathLike[str] = '') -> None:
        """Complete no earlier than this long (0 to 86400 s) after the beginning."""

    def flip_bit(self, nth: int, bit: int, *, count: int = 1, path_prefix: str | os.PathLike[str] = '') -> None:
        """
        Change this bit, modulo the length, of what arrives in memory or on the drive; report no error.
        """

    def hold(self, nth: int, *, count: int = 1, path_prefix: str | os.PathLike[str] = '') -> None:
        """
        Complete only after `release`: a way to test an order without a clock. Closing the pool waits too.
        """

    def release(self) -> None:
        """Let go of what is held, and drop the rules that hold."""

    def limit_bandwidth(self, path_prefix: str | os.PathLike[str], bytes_per_second: int) -> None:
        """
        Let operations on these paths complete at this rate in total, one after the other, as a slow drive would.

        Name a directory with a slash at its end, or `dir1` stands for `dir10` too.
        """

    @property
    def operations(self) -> int:
        """Operations begun so far."""

    @property
    def held(self) -> int:
        """Operations that `hold` holds now."""

    @property
    def struck(self) -> list[tuple[str, str, int]]:
        """
        What the rules struck, in order: "read" or "write", path, offset in bytes.
        """

class IoTicket:
    """
    A transfer under way.

    It keeps the array alive; dropping it waits for the transfer to end.
    """

    def wait(self) -> None:
        """
        Block until the transfer has ended; raises IoError if it failed. Releases the GIL.
        """

    def done(self) -> bool:
        """Whether the transfer has ended, well or badly."""

    @property
    def times(self) -> tuple[float, float] | None:
        """
        When its first call into the system began and its last one ended.

        In seconds of `time.perf_counter`. None until the transfer has ended, and where no call was made.
        """

    def on_done(self, callback: Callable[[IoTicket], object]) -> None:
        """
        Have `callback(ticket)` called once the transfer has ended, well or badly.

        All callbacks of a pool run one after the other, in a thread that lives while there are any outstanding;
        the interpreter's end waits for it. What a callback raises goes to `sys.unraisablehook`.
        """

class IoFile:
    """An open file of fixed size. All methods may be called from any thread."""

    @property
    def path(self) -> str:
        """The path, or the first of a striped file's."""

    @property
    def paths(self) -> list[str]:
        """All paths, in the order they were given."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def direct(self) -> bool:
        """Whether whole pages bypass the page cache (O_DIRECT)."""

    @property
    def direct_refusal(self) -> str:
        """Why `direct` is False; empty when it is True."""

    @property
    def alignment_bytes(self) -> int:
        """
        Ranges that begin and end on multiples of this bypass the page cache as a whole; 1 if none do.
        """

    def read(self, offset: int, target: object, *, urgent: bool = False) -> IoTicket:
        """
        Start filling `target`, a 1-D contiguous host array, from byte `offset`; urgent transfers go first.

        Raises ValueError when the range leaves the file or the file is closed, RuntimeError when the pool is.
        """

    def write(self, offset: int, source: object, *, urgent: bool = False) -> IoTicket:
        """
        Start writing `source`, a 1-D contiguous host array, at byte `offset`; see `read`.

        The array must not change until the transfer has ended.
        """

    def read_batch(self, requests: Iterable[tuple[int, Any]], *, urgent: bool = False) -> list[IoTicket]:
        """
        Start a `read` for each (offset, target), all at once; starts none when one cannot be.
        """

    def write_batch(self, requests: Iterable[tuple[int, Any]], *, urgent: bool = False) -> list[IoTicket]:
        """
        Start a `write` for each (offset, source), all at once; starts none when one cannot be.
        """

    def sync(self) -> None:
        """
        Make what was written durable (fdatasync of every path).

        Raises IoError; what was written since the last sync may then be lost.
        """

    def close(self) -> None:
        """
        Wait for the file's transfers, then close it. Closing twice is harmless.
        """

class IoEngine(enum.Enum):
    """What carries out a pool's transfers."""

    AUTO = 0
    """io_uring, or threads where there is none."""

    URING = 1
    """One thread with an io_uring."""

    THREADS = 2
    """Threads that call pread and pwrite."""

def io_uring_refusal() -> str:
    """
    Why io_uring cannot be used in this process, with call, error and likely cause; empty when it can.
    """

class IoMemory:
    """
    An AlignedBuffer that a pool's kernel side has pinned.

    It keeps the buffer alive, and pinned as long as it lives itself.
    """

    @property
    def refusal(self) -> str:
        """
        Why the memory is not pinned; transfers then work as without. Empty when it is.
        """

class IoPool:
    """
    Reads and writes files, in pieces of up to 4 MiB, with a queue for each directory.

    Using it in a forked child raises RuntimeError.
    """

    def __init__(self, threads: int = 4, *, engine: IoEngine = IoEngine.AUTO, depth: int = 32, faults: FaultPlan | None = None) -> None:
        """
        Start the workers.

        Args:
            threads: calls under way at a time in each directory, with IoEngine.THREADS; 1 to 256.
            engine: IoEngine.URING raises RuntimeError with `io_uring_refusal()` where there is none.
            depth: calls under way at a time in each directory, with IoEngine.URING; 1 to 4096.
            faults: what goes wrong, for tests.
        """

    @property
    def engine(self) -> IoEngine:
        """What carries out the transfers: URING or THREADS."""

    @property
    def engine_refusal(self) -> str:
        """Why AUTO took THREADS; empty when it did not."""

    def open(self, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, size_bytes: int | None = None, stripe_bytes: int = 4194304) -> IoFile:
        """
        Open a regular file for reading and writing; several paths are one file, striped over them in turn.

        With `size_bytes` it is created if missing (mode 0600), set to that size and its space allocated; without,
        it must exist. `stripe_bytes` is a multiple of the page size. Raises IoError, ValueError for what is no
        regular file or not striped like this, RuntimeError when the pool is closed.
        """

    def register_memory(self, buffer: AlignedBuffer) -> IoMemory:
        """
        Have the kernel pin the buffer once instead of for each transfer; it counts as locked memory.

        A refusal (no io_uring, or `ulimit -l`) changes nothing else; IoMemory.refusal says why.
        """

    def close(self) -> None:
        """
        Complete what was submitted and end the workers. Files stay open. Closing twice is harmless.
        """
