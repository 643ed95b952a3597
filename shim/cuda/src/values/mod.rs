//! Values on a device that runs no kernels: who wrote each byte last, and what a value that the host reads is worth.
//!
//! Copies and fills really move bytes, kernels do not. A launch makes every block that the kernel may write *unknown*: the
//! kernel's parameters are found by the table in its cubin ([`fatbin`], [`table`]), device pointers in them by their
//! addresses, and pointers that the kernel only reads by its C++ signature ([`signature`]). Host copies, fills and small
//! operators that the framework's value plane runs on the CPU make bytes *known*; rules and mirrored payloads make them
//! *provided*. What the host reads is graded, counted and, where a rule says so, replaced ([`reads`]).
//!
//! | variable | meaning |
//! |---|---|
//! | `PRISM_VALUES` | `on` (default), `strict`: the first unknown value that the host reads ends the program, `off` |
//! | `PRISM_VALUE_RULES` | a file of rules for reads (see [`reads`]) |
//! | `PRISM_CACHE_DIR` | where tables of kernel parameters are kept |

mod blocks;
mod exports;
mod fatbin;
mod hold;
mod known;
mod lists;
mod ptx;
mod reads;
mod signature;
mod sizes;
mod table;

pub(crate) use exports::received;
pub(crate) use fatbin::Parameter;
pub(crate) use ptx::write_kernel;
pub(crate) use reads::{flush, read};
pub(crate) use signature::declare;

use crate::abi::Dim3;
use crate::kernel::Kernel;
use crate::memory::ADDRESSES;
use blocks::Blocks;
use signature::Access;
use sizes::{Size, Touched};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};

/// How values are treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Off,
    On,
    Strict,
}

static MODE: LazyLock<Mode> = LazyLock::new(|| match std::env::var("PRISM_VALUES").as_deref() {
    Ok("off") => Mode::Off,
    Ok("strict") => Mode::Strict,
    _ => Mode::On,
});

/// Are values graded in this process?
fn is_on() -> bool {
    *MODE != Mode::Off
}

/// One parameter that a kernel may write through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    index: u16,
    offset: u32,
    /// Words of eight bytes in it.
    words: u16,
    access: Access,
}

/// What a launch of a kernel does to the values on the device.
#[derive(Debug)]
pub(crate) enum Plan {
    /// Values are not graded.
    Off,
    /// Its parameters are not known: it may write anything.
    Anything,
    /// It writes through these parameters.
    Through {
        /// Number of the kernel as a writer.
        writer: u32,
        /// Parameters that may hold a pointer it writes through, or that tell its size.
        steps: Box<[Step]>,
        /// What its bytes follow from.
        size: Size,
    },
}

impl Plan {
    fn new(name: &str, parameters: Option<&[fatbin::Parameter]>) -> Self {
        if !is_on() {
            return Self::Off;
        }
        let Some(parameters) = parameters else {
            reads::remark(&format!("kernel {name}: parameters not known, every value on the device counts as unknown"));
            return Self::Anything;
        };
        let signature = signature::demangle(name);
        let label = signature::label(&signature);
        let accesses = signature::accesses(&signature, parameters.len());
        let steps = parameters.iter().zip(accesses).enumerate();
        let size = Size::new(&signature, parameters);
        let counts = |access| size.is_blocks() || access != Access::Reads;
        let steps = steps.filter(|(_, (parameter, access))| parameter.bytes >= 8 && counts(*access));
        let steps = steps.map(|(index, (parameter, access))| Step {
            index: index as u16,
            offset: parameter.offset,
            words: (parameter.bytes / 8) as u16,
            access,
        });
        Self::Through { writer: known::number(&label), steps: steps.collect(), size }
    }
}

/// Where the arguments of a launch are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Arguments {
    /// An address for each parameter.
    Each(*const *const c_void),
    /// One buffer of this many bytes, laid out as the kernel wants it.
    Buffer(*const u8, usize),
}

impl Arguments {
    /// The arguments as `cuLaunchKernel` takes them: addresses, or a buffer in the list `extra`.
    ///
    /// # Safety
    /// As for `cuLaunchKernel`.
    pub(crate) unsafe fn of_driver(parameters: *mut *mut c_void, extra: *mut *mut c_void) -> Self {
        const END: usize = 0;
        const BUFFER: usize = 1;
        const BUFFER_SIZE: usize = 2;
        if !parameters.is_null() || extra.is_null() {
            return Self::Each(parameters.cast_const().cast());
        }
        let (mut buffer, mut size) = (std::ptr::null(), 0);
        // SAFETY: the list consists of a number and a value in turn, up to END.
        unsafe {
            let mut at = extra;
            while (*at).addr() != END {
                match (*at).addr() {
                    BUFFER => buffer = (*at.add(1)).cast_const().cast(),
                    BUFFER_SIZE => size = (*at.add(1)).cast::<usize>().read(),
                    _ => break,
                }
                at = at.add(2);
            }
        }
        Self::Buffer(buffer, size)
    }

    /// Address of a parameter; null if it is not there.
    ///
    /// # Safety
    /// The arguments must be those of a kernel with this parameter.
    #[inline]
    unsafe fn parameter(self, step: &Step) -> *const usize {
        // SAFETY: the contract of this function.
        unsafe { self.address(step.index, step.offset, usize::from(step.words) * 8) }.cast()
    }

    /// Address of the parameter number `index`, `bytes` long, at `offset` in a buffer; null if it is not there.
    ///
    /// # Safety
    /// The arguments must be those of a kernel with this parameter.
    #[inline]
    unsafe fn address(self, index: u16, offset: u32, bytes: usize) -> *const u8 {
        match self {
            Self::Each(addresses) if addresses.is_null() => std::ptr::null(),
            // SAFETY: there is an address for each parameter.
            Self::Each(addresses) => unsafe { addresses.add(usize::from(index)).read().cast() },
            Self::Buffer(start, length) => {
                if start.is_null() || offset as usize + bytes > length {
                    std::ptr::null()
                } else {
                    start.wrapping_add(offset as usize)
                }
            }
        }
    }
}

/// A kernel is launched: what it may write is unknown from here on. Returns how many bytes it moves, 0 if that is not known.
///
/// # Safety
/// The arguments must be those of the kernel.
#[inline]
pub(crate) unsafe fn launched(kernel: &Kernel, grid: Dim3, block: Dim3, arguments: Arguments) -> u64 {
    match kernel.plan.get_or_init(|| Plan::new(&kernel.name, kernel.parameters().as_deref())) {
        Plan::Off => 0,
        Plan::Anything => {
            if !hold::launch(0) {
                known::everything_written();
            }
            0
        }
        Plan::Through { writer, steps, size } => {
            let is_held = hold::launch(*writer);
            // SAFETY: the contract of this function.
            let mut touched = size.is_blocks().then(|| Touched::new(unsafe { size.elements(arguments) }));
            if let Some(blocks) = blocks::existing() {
                for step in steps {
                    // SAFETY: the contract of this function.
                    unsafe { walk(blocks, step, arguments, *writer, is_held, touched.as_mut()) };
                }
            }
            match touched {
                Some(touched) => touched.bytes(grid, block),
                // SAFETY: the contract of this function.
                None => unsafe { size.bytes(arguments, grid, block) },
            }
        }
    }
}

/// Goes through the device pointers in a parameter.
///
/// # Safety
/// The arguments must be those of a kernel with this parameter.
#[inline]
unsafe fn walk(
    blocks: &Blocks,
    step: &Step,
    arguments: Arguments,
    writer: u32,
    is_held: bool,
    mut touched: Option<&mut Touched>,
) {
    // SAFETY: the contract of this function.
    let words = unsafe { arguments.parameter(step) };
    if words.is_null() {
        return;
    }
    let mut seen = 0;
    for index in 0..usize::from(step.words) {
        // SAFETY: the parameter is this long; it need not be aligned.
        let word = unsafe { words.add(index).read_unaligned() };
        if !ADDRESSES.contains(&word) {
            continue;
        }
        seen += 1;
        if step.access == Access::Reads && touched.is_none() {
            continue;
        }
        let Some(block) = blocks.find(word) else { continue };
        if let Some(touched) = touched.as_deref_mut() {
            touched.add(&block, word);
        }
        match step.access {
            Access::Reads => {}
            Access::WritesFirst(count) if seen > count => {
                if touched.is_none() {
                    break;
                }
            }
            Access::WritesAllButFirst if seen == 1 => {}
            _ => hold::written(blocks, &block, writer, is_held),
        }
    }
}

/// Parameters of a kernel that a program registered, by the address of its fat binary.
pub(crate) fn registered_parameters(image: usize, name: &str) -> Option<Vec<Parameter>> {
    table::parameters(image, name)
}

/// Parameters of the kernels in an image that is being loaded; empty where they cannot be read (PTX).
///
/// # Safety
/// `image` must be null or an image as the driver takes them.
pub(crate) unsafe fn loaded_parameters(image: *const c_void) -> BTreeMap<String, Vec<Parameter>> {
    if !is_on() {
        return BTreeMap::new();
    }
    // SAFETY: the contract of this function.
    if let Some(text) = unsafe { ptx::image(image.cast()) } {
        return ptx::kernels(&text);
    }
    // SAFETY: the contract of this function.
    unsafe { fatbin::image(image.cast()) }.map(|image| fatbin::kernels(image, &[])).unwrap_or_default()
}

/// As [`loaded_parameters`], of an image in a file: its length is known.
pub(crate) fn parameters_in_file(image: &[u8]) -> BTreeMap<String, Vec<Parameter>> {
    match image.first() {
        _ if !is_on() => BTreeMap::new(),
        Some(first) if ptx::is_text(*first) => ptx::kernels(&String::from_utf8_lossy(image)),
        _ => fatbin::kernels(image, &[]),
    }
}

/// A library call that is recorded, not run, writes to the block that `address` points into.
pub(crate) fn library_wrote(address: *const c_void, name: &'static str) {
    static NUMBERS: Mutex<BTreeMap<&'static str, u32>> = Mutex::new(BTreeMap::new());
    let Some(blocks) = blocks::existing().filter(|blocks| is_on() && blocks.contains(address.addr())) else { return };
    let mut numbers = NUMBERS.lock().unwrap_or_else(PoisonError::into_inner);
    let writer = *numbers.entry(name).or_insert_with(|| known::number(name));
    let is_held = hold::launch(writer);
    if let Some(block) = blocks.find(address.addr()) {
        hold::written(blocks, &block, writer, is_held);
    }
}

/// A library call that is recorded, not run, may write anything.
pub(crate) fn anything_written() {
    if is_on() && !hold::launch(0) {
        known::everything_written();
    }
}

/// Memory was handed out.
pub(crate) fn allocated(address: usize, bytes: usize) {
    if is_on() {
        known::allocated(address, bytes);
    }
}

/// Memory was given back.
pub(crate) fn freed(address: usize) {
    if is_on() {
        known::freed(address);
    }
}

/// A copy has moved `bytes`; device memory is worth what its source is. Bytes of the host count as known.
pub(crate) fn copied(to: usize, from: usize, bytes: usize) {
    if !is_on() || !ADDRESSES.contains(&to) {
        return;
    }
    if ADDRESSES.contains(&from) {
        known::copied(to, from, bytes);
    } else {
        known::known(to, bytes, None);
    }
}

/// A rule has written `bytes`.
pub(crate) fn provided(to: usize, bytes: usize, rule: &str) {
    if is_on() && ADDRESSES.contains(&to) {
        known::known(to, bytes, Some(known::number(rule)));
    }
}

/// A fill has written `bytes`.
pub(crate) fn filled(to: usize, bytes: usize) {
    if is_on() && ADDRESSES.contains(&to) {
        known::known(to, bytes, None);
    }
}
