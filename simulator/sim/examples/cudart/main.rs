//! The CUDA runtime on the simulator: programs that nvcc compiled run unmodified, kernels and all.
//!
//! ```sh
//! cargo build --release -p dualgemm-sim --example cudart
//! nvcc -gencode arch=compute_90a,code=compute_90a -no-compress -cudart none -c program.cu
//! g++ program.o -L target/release/examples -lcudart -Wl,-rpath,target/release/examples -o program
//! ./program
//! ```
//!
//! The calls that CUTLASS, Thrust and CUDA's samples make are here: memory, launches with clusters, tensor maps,
//! device properties. Streams and events exist; everything is done at once. The PTX must be in the program
//! uncompressed. `SIM_SEED=7` chooses the interleaving, `SIM_CHECKS` the checks (`all`, `none`, or a list
//! of those to leave out: `race,uninit,exit`), `SIM_LIMIT=1000000` stops a warp that executes more instructions than
//! that (without it 2^32: minutes of an endless loop), `SIM_TRACE=1` prints each launch, `SIM_RECORD=DIR` writes
//! module and launch to files.
//!
//! Flow: [`launch`] (what nvcc's stubs call: binaries, kernels, launches), [`memory`], [`device`] and [`tensor_map`]
//! are the calls, over [`runtime`] (the card and what programs registered) and [`abi`] (structs and numbers of CUDA's
//! headers).
//!
//! Calls: CUDA Runtime API, <https://docs.nvidia.com/cuda/cuda-runtime-api/>. Signatures are C's.

/// Functions that follow pointers of the caller.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $out:ty $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the CUDA runtime, or what its headers call.")]
        ///
        /// # Safety
        /// Pointers are valid as the CUDA Runtime API requires of this call.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $out {
            // SAFETY: the body follows the pointers it was given and no others; they are as the API asks for, by the
            // caller's word.
            unsafe { $body }
        }
    )*};
}

/// Functions that follow none.
macro_rules! safe_exports {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $out:ty $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the CUDA runtime, or what its headers call.")]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> $out $body
    )*};
}

/// Calls that succeed and do nothing: streams and events exist, everything is done at once.
macro_rules! nothing {
    ($($name:ident),* $(,)?) => {
        safe_exports! { $(fn $name() -> Status { SUCCESS })* }
    };
}

mod abi;
mod device;
mod launch;
mod memory;
mod runtime;
mod tensor_map;
