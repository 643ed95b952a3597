//! The emulated CUDA device: a stand-in for the CUDA driver, runtime and math libraries, preloaded under a training
//! program. Kernels are not run; every call becomes a record for the engine, which answers with virtual time.
//!
//! Without the environment variable `PRISM_SESSION` the library is inert: it shows no device and leaves the clocks alone.
//!
//! | module | job |
//! |---|---|
//! | [`session`] | the connection to the engine, lazily made: append, query, control, name ids |
//! | [`clock`], [`interpose`], [`polls`] | the virtual host clock and the libc functions that read or wait for it |
//! | [`hosttime`] | constants or measured time for the host's part of calls |
//! | [`handoff`] | timed waits of background threads, in virtual time |
//! | [`memory`] | device, pinned and virtual-memory allocations, copies, exact accounting |
//! | [`stream`], [`event`] | dense ids behind opaque handles |
//! | [`capture`] | what is issued on streams that are captured into CUDA graphs, and launches of graphs |
//! | [`kernel`] | registered kernels and launches |
//! | [`runtime`], [`driver`] | the C functions of libcudart and libcuda |
//! | [`libs`] | the C functions of the math libraries, NVRTC and CUPTI |
//! | [`functions`] | the list of what is served and what is refused |
//! | [`hook`] | functions for other preloaded libraries and the framework hook |
//! | [`values`] | who wrote each byte last, and what a value that the host reads is worth |
//! | [`unsupported`] | calls that fail loudly, with their name |
#![allow(non_snake_case, reason = "exported names are those of the CUDA libraries")]
#![allow(unreachable_pub, reason = "extern \"C\" exports are reached by the dynamic linker, not by Rust paths")]

mod abi;
mod capture;
mod clock;
mod config;
mod demangle;
mod device;
mod driver;
mod event;
mod export;
mod foresight;
mod functions;
mod guard;
mod handoff;
mod hook;
mod hosttime;
mod interpose;
mod kernel;
mod libs;
mod memory;
mod original;
mod polls;
mod python;
mod real;
mod runtime;
mod session;
mod stream;
mod unsupported;
mod values;
