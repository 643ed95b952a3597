//! Kernel tables: durations somebody measured, looked up before anything is modelled.
//!
//! A table is TOML, versioned, of one device, and says where its rows come from:
//!
//! ```
//! use prism_engine::cost::kernels::KernelTable;
//! let table = KernelTable::from_toml(r#"
//!     version = 1
//!     device = "NVIDIA H100 80GB HBM3"
//!     provenance = "measured"
//!
//!     [[kernel]]
//!     name = "void at::native::vectorized_elementwise_kernel<8, *"
//!     grid = [4096, 1, 1]
//!     threads = 128
//!     ns = 11200
//!
//!     [[gemm]]
//!     m = 4096
//!     n = 14336
//!     k = 4096
//!     input = "bf16"
//!     ns = 702000
//!
//!     [[operator]]
//!     name = "cudnn.sdpa_forward"
//!     flop = 137438953472
//!     input = "bf16"
//!     ns = 310000
//! "#).unwrap();
//! assert_eq!(table.num_rows(), 3);
//! ```
//!
//! * `[[kernel]]`: `name` as a profiler shows it (demangled; blanks do not count; `*` stands for any text), `grid` and
//!   `threads` per block. Without grid and threads the row holds for every launch of the name.
//! * `[[gemm]]`: a matrix product of a library, whatever kernels it runs. The order of `m` and `n` does not count, because a
//!   row-major product is the column-major one of the transposed matrices. `batch` is 1 if not given, `compute` follows from
//!   `input`.
//! * `[[operator]]`: an operator of cuDNN or cuFFT by name, FLOP (0 where it has none) and input type.
//!
//! Rows with exact names come before rows with patterns, and of several the one that stands first in the file holds.

use super::compute::Work;
use crate::graph::op::{DataType, Provenance};
use crate::units::SimTime;
use indexmap::IndexMap;
use serde::Deserialize;

/// The version of the form described above.
pub const VERSION: u32 = 1;

/// A table that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelTableError {
    /// The text is not a table: a key is missing, unknown or of the wrong type. The text names it.
    #[error("kernel table: {0}")]
    Text(#[from] toml::de::Error),
    /// A table of another version.
    #[error("kernel table: version {found} is not known (this program reads version {VERSION})")]
    Version {
        /// The version the table names.
        found: u32,
    },
    /// A table of another device.
    #[error(
        "the kernel table is of `{table}`, the emulated device is `{device}`: if the two are alike, change `device` in the table"
    )]
    Device {
        /// The device the table names.
        table: String,
        /// The profile's device.
        device: String,
    },
    /// A row that says nothing usable.
    #[error("kernel table: {table} row {row}: {problem}")]
    Row {
        /// `kernel`, `gemm` or `operator`.
        table: &'static str,
        /// Its number, from 1.
        row: usize,
        /// What is wrong.
        problem: &'static str,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    version: u32,
    device: String,
    provenance: Source,
    #[serde(default)]
    #[allow(dead_code, reason = "for the reader of the file")]
    source: String,
    #[serde(default)]
    kernel: Vec<KernelRow>,
    #[serde(default)]
    gemm: Vec<GemmRow>,
    #[serde(default)]
    operator: Vec<OperatorRow>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Source {
    Measured,
    Imported,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KernelRow {
    name: String,
    grid: Option<[u32; 3]>,
    threads: Option<u32>,
    ns: f64,
    #[serde(default)]
    #[allow(dead_code, reason = "for the reader of the file")]
    samples: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GemmRow {
    m: u64,
    n: u64,
    k: u64,
    #[serde(default = "one")]
    batch: u64,
    input: String,
    compute: Option<String>,
    ns: f64,
    #[serde(default)]
    #[allow(dead_code, reason = "for the reader of the file")]
    samples: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OperatorRow {
    name: String,
    flop: u64,
    input: String,
    ns: f64,
    #[serde(default)]
    #[allow(dead_code, reason = "for the reader of the file")]
    samples: u64,
}

const fn one() -> u64 {
    1
}

/// A duration and where it comes from.
type Known = (SimTime, Provenance);
/// Grid and threads per block.
type Launch = ([u32; 3], u32);

/// A matrix product as a table names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Product {
    sides: [u64; 2],
    k: u64,
    batch: u64,
    /// The type whose arithmetic it is: float32 multiplied as TF32 is TF32, both 8-bit floats are one.
    arithmetic: DataType,
}

impl Product {
    fn new([m, n]: [u64; 2], k: u64, batch: u64, input: DataType, compute: DataType) -> Self {
        let arithmetic = match (input, compute) {
            (DataType::Float32, DataType::Tf32) | (DataType::Tf32, _) => DataType::Tf32,
            (DataType::Float8e5m2, _) => DataType::Float8e4m3,
            (input, _) => input,
        };
        Self { sides: [m.min(n), m.max(n)], k, batch, arithmetic }
    }
}

/// Durations that need no model.
#[derive(Clone, Debug, Default)]
pub struct KernelTable {
    /// By plain name, then launch; `None` stands for every launch.
    kernels: IndexMap<String, IndexMap<Option<Launch>, Known>>,
    patterns: Vec<(Pattern, Option<Launch>, Known)>,
    gemms: IndexMap<Product, Known>,
    operators: IndexMap<(String, u64, DataType), Known>,
    num_rows: usize,
}

/// A name with stars, as the texts between them.
#[derive(Clone, Debug)]
struct Pattern(Vec<String>);

impl Pattern {
    fn matches(&self, name: &str) -> bool {
        let [first, between @ .., last] = &self.0[..] else { return false };
        let Some(mut rest) = name.strip_prefix(first.as_str()) else { return false };
        for part in between {
            let Some(at) = rest.find(part.as_str()) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last.as_str())
    }
}

/// The rows that a name may fall under: looked up once per name.
#[derive(Clone, Debug, Default)]
pub struct NamedRows {
    rows: IndexMap<Option<Launch>, Known>,
}

impl KernelTable {
    /// Reads a table.
    pub fn from_toml(text: &str) -> Result<Self, KernelTableError> {
        Self::read(text, None)
    }

    /// Reads a table that must be of the device called `device`.
    pub fn of_device(text: &str, device: &str) -> Result<Self, KernelTableError> {
        Self::read(text, Some(device))
    }

    fn read(text: &str, device: Option<&str>) -> Result<Self, KernelTableError> {
        let text: Text = toml::from_str(text)?;
        if text.version != VERSION {
            return Err(KernelTableError::Version { found: text.version });
        }
        if let Some(device) = device.filter(|device| *device != text.device) {
            return Err(KernelTableError::Device { table: text.device, device: device.to_owned() });
        }
        let provenance = match text.provenance {
            Source::Measured => Provenance::Measured,
            Source::Imported => Provenance::Imported,
        };
        let mut table = Self::default();
        for (row, entry) in text.kernel.into_iter().enumerate() {
            let problem = |problem| KernelTableError::Row { table: "kernel", row: row + 1, problem };
            table.add_kernel(&entry, provenance).map_err(problem)?;
        }
        for (row, entry) in text.gemm.into_iter().enumerate() {
            let problem = |problem| KernelTableError::Row { table: "gemm", row: row + 1, problem };
            table.add_gemm(&entry, provenance).map_err(problem)?;
        }
        for (row, entry) in text.operator.into_iter().enumerate() {
            let problem = |problem| KernelTableError::Row { table: "operator", row: row + 1, problem };
            let known = (time(entry.ns).map_err(problem)?, provenance);
            let input = DataType::from_short_name(&entry.input).ok_or_else(|| problem(NO_TYPE))?;
            table.operators.entry((entry.name, entry.flop, input)).or_insert(known);
            table.num_rows += 1;
        }
        Ok(table)
    }

    fn add_kernel(&mut self, row: &KernelRow, provenance: Provenance) -> Result<(), &'static str> {
        let known = (time(row.ns)?, provenance);
        let launch = match (row.grid, row.threads) {
            (Some(grid), Some(threads)) => Some((grid, threads)),
            (None, None) => None,
            _ => return Err("`grid` and `threads` come together or not at all"),
        };
        if row.name.is_empty() {
            return Err("`name` is empty");
        }
        let name = without_blanks(&row.name);
        if is_pattern(&name) {
            let parts = split_stars(&name);
            self.patterns.push((Pattern(parts), launch, known));
        } else {
            self.kernels.entry(name).or_default().entry(launch).or_insert(known);
        }
        self.num_rows += 1;
        Ok(())
    }

    fn add_gemm(&mut self, row: &GemmRow, provenance: Provenance) -> Result<(), &'static str> {
        let known = (time(row.ns)?, provenance);
        let input = DataType::from_short_name(&row.input).ok_or(NO_TYPE)?;
        let compute = match &row.compute {
            Some(name) => DataType::from_short_name(name).ok_or(NO_TYPE)?,
            None => input,
        };
        let product = Product::new([row.m, row.n], row.k, row.batch, input, compute);
        self.gemms.entry(product).or_insert(known);
        self.num_rows += 1;
        Ok(())
    }

    /// Takes the rows of `other` that are not in this table yet.
    pub fn extend(&mut self, other: Self) {
        for (name, rows) in other.kernels {
            let own = self.kernels.entry(name).or_default();
            for (launch, known) in rows {
                own.entry(launch).or_insert(known);
            }
        }
        self.patterns.extend(other.patterns);
        for (product, known) in other.gemms {
            self.gemms.entry(product).or_insert(known);
        }
        for (operator, known) in other.operators {
            self.operators.entry(operator).or_insert(known);
        }
        self.num_rows += other.num_rows;
    }

    /// Rows as read.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// What the table knows of kernels with the (demangled) name `name`.
    #[must_use]
    pub fn named(&self, name: &str) -> NamedRows {
        let name = without_blanks(name);
        let mut rows = self.kernels.get(&name).cloned().unwrap_or_default();
        for (pattern, launch, known) in &self.patterns {
            if pattern.matches(&name) {
                rows.entry(*launch).or_insert(*known);
            }
        }
        NamedRows { rows }
    }

    /// The duration of library work, if the table has it. Kernels are found by [`NamedRows::find`].
    #[must_use]
    pub fn find(&self, name: &str, work: &Work) -> Option<Known> {
        match *work {
            Work::Gemm { m, n, k, batch, input, compute } => {
                self.gemms.get(&Product::new([m, n], k, batch, input, compute)).copied()
            }
            Work::Operator { flops, input, .. } if !self.operators.is_empty() => {
                self.operators.get(&(name.to_owned(), flops, input)).copied()
            }
            _ => None,
        }
    }
}

impl NamedRows {
    /// The duration of a launch.
    #[must_use]
    pub fn find(&self, grid: [u32; 3], threads_per_block: u32) -> Option<Known> {
        if self.rows.is_empty() {
            return None;
        }
        self.rows.get(&Some((grid, threads_per_block))).or_else(|| self.rows.get(&None)).copied()
    }
}

const NO_TYPE: &str = "the type is none of bf16, fp16, fp32, tf32, fp64, fp8, int8";

/// Longest duration a row may have: an hour.
const LONGEST_NS: f64 = 3.6e12;

fn time(ns: f64) -> Result<SimTime, &'static str> {
    if !(ns > 0.0 && ns <= LONGEST_NS) {
        return Err("`ns` must be above 0 and at most an hour");
    }
    Ok(SimTime::from_secs_f64(ns / 1e9))
}

fn without_blanks(name: &str) -> String {
    name.chars().filter(|character| !character.is_whitespace()).collect()
}

/// A star between blanks, brackets or at an end is a pattern's; one after a type name (`char*`) is the name's own.
fn is_pattern(name: &str) -> bool {
    split_stars(name).len() > 1
}

/// Cuts a name at its pattern stars. A star of a pointer type follows a letter, a digit, `>`, `_` or another star and is
/// followed by `,`, `)`, `>`, `*`, `&`, `const` or `[`; every other star, and one at the end of the name, stands for any text.
fn split_stars(name: &str) -> Vec<String> {
    let bytes = name.as_bytes();
    let mut parts = vec![String::new()];
    for (at, character) in name.char_indices() {
        let rest = &name[at..];
        let after = rest.strip_prefix('*').unwrap_or("");
        let before = at.checked_sub(1).map(|before| bytes[before]);
        let is_pointer = before.is_some_and(|b| b.is_ascii_alphanumeric() || b"_>*".contains(&b))
            && (after.starts_with([',', ')', '>', '*', '&', '[']) || after.starts_with("const"));
        if character == '*' && !is_pointer {
            parts.push(String::new());
        } else if let Some(last) = parts.last_mut() {
            last.push(character);
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_of_pointers_are_no_patterns() {
        assert!(!is_pattern("voidf<4,std::array<char*,3ul>>(int,floatconst*,float**)"));
        assert!(is_pattern("voidf<4,*"));
        assert!(is_pattern("*gemm*"));
        let pattern = Pattern(split_stars("voidf<*>(float*,*)"));
        assert!(pattern.matches("voidf<1,2>(float*,int)"));
        assert!(!pattern.matches("voidf<1,2>(double*,int)"));
        assert!(!pattern.matches("xvoidf<1>(float*,)"));
    }
}
