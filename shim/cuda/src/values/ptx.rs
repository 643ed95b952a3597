//! PTX: which parameters each kernel of a text takes, as its `.entry` directives declare them.
//!
//! The grammar is that of the PTX ISA, "Kernel Function Directives: .entry" and "Parameterized Variable Names: .param".

use super::fatbin::{Kernels, MOST_PARAMETER_BYTES, Parameter};
use std::borrow::Cow;
use std::ffi::CStr;
use std::fmt::Write;

/// Types of parameters with their bytes.
const TYPES: [(&str, u32); 16] = [
    (".b8", 1),
    (".u8", 1),
    (".s8", 1),
    (".b16", 2),
    (".u16", 2),
    (".s16", 2),
    (".f16", 2),
    (".f16x2", 4),
    (".b32", 4),
    (".u32", 4),
    (".s32", 4),
    (".f32", 4),
    (".b64", 8),
    (".u64", 8),
    (".s64", 8),
    (".f64", 8),
];

/// Does an image with this first byte hold text? Fat binaries and ELF files start with other bytes.
pub(super) const fn is_text(first: u8) -> bool {
    matches!(first, b'.' | b'/' | b' ' | b'\t' | b'\r' | b'\n')
}

/// The text of an image given to the driver; `None` if it is none.
///
/// # Safety
/// `image` must be null or an image as CUDA takes them: text ends with a zero.
pub(super) unsafe fn image<'a>(image: *const u8) -> Option<Cow<'a, str>> {
    // SAFETY: every image has a first byte.
    if image.is_null() || !is_text(unsafe { image.read() }) {
        return None;
    }
    // SAFETY: the contract of this function.
    Some(unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy())
}

/// Parameters of the kernels of a text; a kernel whose parameters cannot be read is left out.
pub(super) fn kernels(text: &str) -> Kernels {
    let mut found = Kernels::new();
    for rest in text.split(".entry").skip(1) {
        let Some((name, list)) = entry(rest) else { continue };
        if let Some(parameters) = parameters(list) {
            found.insert(name.trim().to_owned(), parameters);
        }
    }
    found
}

/// Name and parameter list of what follows `.entry`. A name of a C++ expression may have brackets of its own.
fn entry(rest: &str) -> Option<(&str, &str)> {
    for (at, letter) in rest.char_indices() {
        let after = &rest[at + letter.len_utf8()..];
        match letter {
            '{' => return Some((&rest[..at], "")),
            '(' if after.trim_start().starts_with([')', '.']) => {
                return Some((&rest[..at], &after[..after.find(')')?]));
            }
            _ => {}
        }
    }
    None
}

fn parameters(list: &str) -> Option<Vec<Parameter>> {
    let mut end = 0_u32;
    let declarations = list.split(',').map(str::trim).filter(|text| !text.is_empty());
    let place = |declaration| {
        let (bytes, alignment) = declared(declaration)?;
        let offset = end.checked_next_multiple_of(alignment)?;
        end = offset.checked_add(bytes).filter(|end| *end <= MOST_PARAMETER_BYTES)?;
        Some(Parameter { offset, bytes })
    };
    declarations.map(place).collect()
}

/// Bytes and alignment of `.param [.align N] .TYPE [.ptr ...] name[COUNT]`.
fn declared(declaration: &str) -> Option<(u32, u32)> {
    let (mut words, mut asked) = (declaration.strip_prefix(".param")?.split_whitespace(), 1);
    let bytes = loop {
        let word = words.next()?;
        if word == ".align" {
            asked = words.next()?.parse().ok().filter(|alignment: &u32| alignment.is_power_of_two())?;
        } else {
            break TYPES.iter().find(|(name, _)| *name == word)?.1;
        }
    };
    let count = match declaration.split_once('[') {
        Some((_, count)) => count.strip_suffix(']')?.trim().parse().ok()?,
        None => 1,
    };
    Some((bytes.checked_mul(count)?, asked.max(bytes)))
}

/// Appends a kernel that does nothing and takes these parameters.
pub(crate) fn write_kernel(text: &mut String, name: &str, parameters: &[Parameter]) {
    let list = parameters.iter().enumerate().map(|(index, parameter)| {
        // The alignment that puts it where it is, after the parameters before it.
        let alignment = 1 << parameter.offset.trailing_zeros().min(4);
        format!("\n\t.param .align {alignment} .b8 p{index}[{}]", parameter.bytes)
    });
    let list = list.collect::<Vec<_>>().join(",");
    write!(text, ".visible .entry {name}({list})\n{{\n\tret;\n}}\n").expect("a text takes all that is written");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str, name: &str) -> Option<Vec<(u32, u32)>> {
        let list = kernels(text).remove(name)?;
        Some(list.iter().map(|parameter| (parameter.offset, parameter.bytes)).collect())
    }

    #[test]
    fn parameters_of_a_compiler_s_text() {
        let text = ".version 8.0\n.target sm_90\n.visible .entry _Z1kPf(\n\t.param .u64 .ptr .global .align 4 k_0,\n\t.param .u32 k_1,\
                    \n\t.param .align 16 .b8 k_2[40],\n\t.param .f64 k_3\n)\n{ ret; }\n.entry bare\n{ ret; }\n.entry none() { ret; }";
        assert_eq!(of(text, "_Z1kPf").expect("is there"), [(0, 8), (8, 4), (16, 40), (56, 8)]);
        assert_eq!(of(text, "bare").expect("is there"), []);
        assert_eq!(of(text, "none").expect("is there"), []);
        assert_eq!(of(text, "other"), None);
    }

    #[test]
    fn what_is_written_is_read() {
        let parameters: Vec<_> =
            [(0, 8), (8, 4), (12, 1), (16, 112)].map(|(offset, bytes)| Parameter { offset, bytes }).into();
        let mut text = String::new();
        write_kernel(&mut text, "&::n::k<(int)3, t<long> >", &parameters);
        assert_eq!(kernels(&text).remove("&::n::k<(int)3, t<long> >"), Some(parameters));
    }

    #[test]
    fn damage_is_left_out() {
        for list in
            [".param .u99 a", ".param .u64 a[", ".param .align 3 .b8 a[4]", ".param .b64 a[99999999999]", ".reg .b32 a"]
        {
            assert_eq!(of(&format!(".entry k({list})"), "k"), None, "{list}");
        }
        assert!(kernels(".entry .entry k( .entry (").is_empty());
    }
}
