//! NHD blocks to universal and back on the host engine, declared by hand: what a Rust user without a binding does.
use std::ffi::{c_char, c_int, c_void, CStr};

const DTYPE_BF16: c_int = 1;
const LAYOUT_NHD: c_int = 0;
const ERROR_INVALID_VALUE: c_int = 1;
const ERROR_STUB_LIBRARY: c_int = 34;

extern "C" {
    fn kvbm_kernels_version() -> *const c_char;
    fn kvbm_kernels_is_stub_build() -> bool;
    fn kvbm_kernels_last_error_message() -> *const c_char;
    fn kvbm_kernels_status_name(status: c_int) -> *const c_char;
    fn kvbm_kernels_host_universal_from_block(
        universal_ptrs: *const *mut c_void,
        block_ptrs: *const *const c_void,
        num_blocks: usize,
        nh: usize,
        nl: usize,
        no: usize,
        nt: usize,
        hd: usize,
        dtype_value: c_int,
        layout_value: c_int,
        num_threads: c_int,
    ) -> c_int;
    fn kvbm_kernels_host_block_from_universal(
        universal_ptrs: *const *const c_void,
        block_ptrs: *const *mut c_void,
        num_blocks: usize,
        nh: usize,
        nl: usize,
        no: usize,
        nt: usize,
        hd: usize,
        dtype_value: c_int,
        layout_value: c_int,
        num_threads: c_int,
    ) -> c_int;
    fn kvbm_kernels_launch_vectorized_copy(
        src_ptrs_device: *mut *mut c_void,
        dst_ptrs_device: *mut *mut c_void,
        copy_size_bytes: usize,
        num_pairs: c_int,
        stream: *mut c_void,
    ) -> c_int;
    fn kvbm_kernels_memcpy_batch(
        src_ptrs_host: *const *const c_void,
        dst_ptrs_host: *const *mut c_void,
        size_per_copy: usize,
        num_copies: usize,
        mode_value: c_int,
        stream: *mut c_void,
    ) -> c_int;
}

const NB: usize = 2;
const NH: usize = 3;
const NL: usize = 2;
const NO: usize = 2;
const NT: usize = 4;
const HD: usize = 8;

fn text(string: *const c_char) -> String {
    // The library's strings are never null and end with a zero.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

fn show(call: &str, status: c_int) {
    let name = text(unsafe { kvbm_kernels_status_name(status) });
    println!(
        "{call}: {status} {name}: {}",
        text(unsafe { kvbm_kernels_last_error_message() })
    );
}

fn main() {
    println!("version {}", text(unsafe { kvbm_kernels_version() }));

    let chunks: Vec<Vec<u16>> = (0..NB * NL * NO)
        .map(|c| (0..NT * NH * HD).map(|i| (c * 1000 + i) as u16).collect())
        .collect();
    let mut universals = vec![vec![0u16; NH * NL * NO * NT * HD]; NB];
    let chunk_ptrs: Vec<_> = chunks.iter().map(|c| c.as_ptr().cast::<c_void>()).collect();
    let universal_ptrs: Vec<_> = universals.iter_mut().map(|u| u.as_mut_ptr().cast::<c_void>()).collect();
    let status = unsafe {
        kvbm_kernels_host_universal_from_block(
            universal_ptrs.as_ptr(),
            chunk_ptrs.as_ptr(),
            NB,
            NH,
            NL,
            NO,
            NT,
            HD,
            DTYPE_BF16,
            LAYOUT_NHD,
            0,
        )
    };
    assert_eq!(status, 0);
    for b in 0..NB {
        for (h, l, o, t, d) in indices() {
            let there = universals[b][(((h * NL + l) * NO + o) * NT + t) * HD + d];
            assert_eq!(there, chunks[(b * NL + l) * NO + o][(t * NH + h) * HD + d]);
        }
    }

    let mut restored = vec![vec![0u16; NT * NH * HD]; NB * NL * NO];
    let restored_ptrs: Vec<_> = restored.iter_mut().map(|c| c.as_mut_ptr().cast::<c_void>()).collect();
    let universal_ptrs: Vec<_> = universals.iter().map(|u| u.as_ptr().cast::<c_void>()).collect();
    let status = unsafe {
        kvbm_kernels_host_block_from_universal(
            universal_ptrs.as_ptr(),
            restored_ptrs.as_ptr(),
            NB,
            NH,
            NL,
            NO,
            NT,
            HD,
            DTYPE_BF16,
            LAYOUT_NHD,
            0,
        )
    };
    assert_eq!(status, 0);
    assert_eq!(restored, chunks);
    println!("NHD -> universal -> NHD: {NB} blocks equal");

    let null: *mut c_void = std::ptr::null_mut();
    let status = unsafe { kvbm_kernels_launch_vectorized_copy(null.cast(), null.cast(), 16, -1, null) };
    show("launch_vectorized_copy", status);
    assert_eq!(status, ERROR_INVALID_VALUE);

    let (from, mut to) = ([7u8; 16], [0u8; 16]);
    let (src, dst) = ([from.as_ptr().cast::<c_void>()], [to.as_mut_ptr().cast::<c_void>()]);
    let status = unsafe { kvbm_kernels_memcpy_batch(src.as_ptr(), dst.as_ptr(), 16, 1, 0, null) };
    show("memcpy_batch", status);
    assert_eq!(status == ERROR_STUB_LIBRARY, unsafe { kvbm_kernels_is_stub_build() });
    if status == 0 {
        assert_eq!(from, to);
    }
}

fn indices() -> impl Iterator<Item = (usize, usize, usize, usize, usize)> {
    (0..NH * NL * NO * NT * HD).map(|i| {
        (
            i / (HD * NT * NO * NL),
            i / (HD * NT * NO) % NL,
            i / (HD * NT) % NO,
            i / HD % NT,
            i % HD,
        )
    })
}
