import ctypes
import mmap
import threading

from engine.memory import _PAGE_IN_BYTES, host_bytes, page_in


def resident_bytes(view):
    """How much of the mapping the kernel has in memory."""
    num_pages = -(-view.nbytes // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    mincore = ctypes.CDLL(None).mincore
    assert mincore(ctypes.c_void_p(address), ctypes.c_size_t(view.nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_paging_in_backs_all_memory_and_changes_nothing():
    num_bytes = 2 * _PAGE_IN_BYTES + 3 * mmap.PAGESIZE
    _, view = host_bytes(num_bytes)
    view[5:8] = b"abc"
    before = resident_bytes(view)
    page_in(view, threading.Event())
    assert before < num_bytes == resident_bytes(view)
    assert bytes(view[:9]) == b"\0" * 5 + b"abc" + b"\0"
    assert not any(view[9 :: mmap.PAGESIZE])


def test_paging_in_ends_after_a_piece_once_told():
    _, view = host_bytes(4 * _PAGE_IN_BYTES)
    stop = threading.Event()
    stop.set()
    page_in(view, stop)
    assert resident_bytes(view) < view.nbytes
