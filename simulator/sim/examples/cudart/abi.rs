//! What CUDA's headers fix: status codes, structs that programs pass, properties by their offsets, fat binaries.

use dualgemm_device::DeviceInfo;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// What a card answers.
pub(crate) type Answer = fn(&DeviceInfo) -> u32;

/// `cudaError_t`
pub(crate) type Status = c_int;
pub(crate) const SUCCESS: Status = 0;
pub(crate) const INVALID_VALUE: Status = 1;
pub(crate) const OUT_OF_MEMORY: Status = 2;
pub(crate) const INVALID_FUNCTION: Status = 98;
pub(crate) const LAUNCH_FAILURE: Status = 719;
/// `cudaDevAttr...` this library answers, others are 0.
pub(crate) const ATTRIBUTES: [(c_int, Answer); 11] = [
    (1, |_| 1024),              // MaxThreadsPerBlock
    (5, |_| i32::MAX as u32),   // MaxGridDimX
    (6, |_| 65535),             // MaxGridDimY
    (7, |_| 65535),             // MaxGridDimZ
    (8, |_| 48 << 10),          // MaxSharedMemoryPerBlock
    (10, |_| 32),               // WarpSize
    (16, |i| i.sm_count),       // MultiProcessorCount
    (39, |_| 2048),             // MaxThreadsPerMultiProcessor
    (75, |i| i.arch.major),     // ComputeCapabilityMajor
    (76, |i| i.arch.minor),     // ComputeCapabilityMinor
    (97, |i| i.shared_per_cta), // MaxSharedMemoryPerBlockOptin
];

/// `dim3`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dim3(pub(crate) [u32; 3]);

/// `cudaLaunchConfig_t`
#[repr(C)]
pub struct LaunchConfig {
    pub(crate) grid: Dim3,
    pub(crate) block: Dim3,
    pub(crate) shared: usize,
    stream: *mut c_void,
    attributes: *const Attribute,
    count: c_uint,
}

/// `cudaLaunchAttribute`
#[repr(C, align(8))]
pub struct Attribute {
    id: c_int,
    padding: c_int,
    value: [u32; 16],
}

impl LaunchConfig {
    /// # Safety
    /// `attributes` points to `count` attributes.
    pub(crate) unsafe fn cluster(&self) -> [u32; 3] {
        let mut attributes = (0..self.count as usize).map(|i| {
            // SAFETY: `i` is below `count`, the number of attributes that the pointer is valid for; they are plain integers.
            unsafe { &*self.attributes.add(i) }
        });
        // `cudaLaunchAttributeClusterDimension`
        let found = attributes.rfind(|a| a.id == 4);
        found.map_or([1; 3], |a| [a.value[0], a.value[1], a.value[2]])
    }
}

/// The PTX of a fat binary (`fatbinary`'s format: a header, then entries with a header each).
///
/// # Safety
/// `data` is what nvcc put into the program.
pub(crate) unsafe fn ptx_of(data: *const u8) -> Option<String> {
    // SAFETY: the caller's data start with a header of 16 bytes, whose fields lead from entry to entry.
    let byte = |at: usize| unsafe { *data.add(at) };
    let word = |at: usize, n: usize| (0..n).fold(0u64, |v, i| v | u64::from(byte(at + i)) << (8 * i));
    let (mut at, end) = (word(6, 2) as usize, word(8, 8) as usize + word(6, 2) as usize);
    while at < end {
        let (kind, header, bytes) = (word(at, 2), word(at + 4, 4) as usize, word(at + 8, 8) as usize);
        let compressed = word(at + 40, 8) & 0xa000 != 0;
        if kind == 1 && compressed {
            eprintln!("the program's PTX is compressed: compile with nvcc -no-compress");
        } else if kind == 1 {
            // SAFETY: an entry is its header and then `bytes` bytes, all of them before `end`, and nvcc's data are constant.
            let text = unsafe { std::slice::from_raw_parts(data.add(at + header), bytes) };
            let text = text.split(|b| *b == 0).next().unwrap_or_default();
            return Some(String::from_utf8_lossy(text).into_owned());
        }
        at += header + bytes;
    }
    None
}

/// # Safety
/// `p` points to bytes that end with a zero, and nothing writes them meanwhile.
pub(crate) unsafe fn string(p: *const c_char) -> String {
    // SAFETY: the bytes up to the zero are readable and unchanged until they are copied, at the end of this line.
    unsafe { CStr::from_ptr(p) }.to_string_lossy().into_owned()
}

/// # Safety
/// `to` is null, or valid for a write of a `T`.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: it is not null, so it is valid for this write; what it held is plain data, which needs no drop.
        unsafe { to.write(value) }
    }
}

/// `cudaDeviceProp`, by its offsets in CUDA 13.
pub(crate) fn properties_of(info: &DeviceInfo) -> [u8; 1008] {
    let mut bytes = [0; 1008];
    let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    set(0, &info.name.as_bytes()[..info.name.len().min(255)]);
    set(288, &info.memory_bytes.to_le_bytes());
    set(296, &(48u64 << 10).to_le_bytes());
    set(624, &u64::from(info.shared_per_sm).to_le_bytes());
    set(672, &u64::from(info.shared_per_cta).to_le_bytes());
    let words = [
        (304, info.registers_per_sm),
        (308, 32),
        (320, 1024),
        (324, 1024),
        (328, 1024),
        (332, 64),
        (336, i32::MAX as u32),
        (340, 65535),
        (344, 65535),
        (360, info.arch.major),
        (364, info.arch.minor),
        (384, info.sm_count),
        (588, 1),
        (596, info.l2_bytes as u32),
        (604, 2048),
        (632, info.registers_per_sm),
        (688, 32),
    ];
    words.into_iter().for_each(|(at, value)| set(at, &value.to_le_bytes()));
    bytes
}
