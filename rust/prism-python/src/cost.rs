//! Durations of single pieces of device work.

use crate::error::{ConfigError, from_json};
use crate::replay::profile_of;
use prism_engine::cost::compute::Work;
use prism_engine::cost::durations::Durations;
use prism_engine::cost::kernels::KernelTable;
use prism_engine::graph::op::DataType;
use prism_engine::ids::NameId;
use prism_engine::profile::Profile;
use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::{Value, json};

/// Tables, the first that knows a kernel holds; each must be of the profile's device.
pub(crate) fn table_of(texts: &[String], profile: &Profile) -> PyResult<KernelTable> {
    let mut table = KernelTable::default();
    for text in texts {
        let next = KernelTable::of_device(text, &profile.device.name);
        table.extend(next.map_err(|error| ConfigError::new_err(error.to_string()))?);
    }
    Ok(table)
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
enum Asked {
    Kernel {
        #[serde(default)]
        name: String,
        grid: [u32; 3],
        threads: u32,
        #[serde(default)]
        bytes: u64,
    },
    Gemm {
        m: u64,
        n: u64,
        k: u64,
        batch: u64,
        input: String,
        compute: String,
    },
    Operator {
        name: String,
        flop: u64,
        bytes: u64,
        input: String,
    },
}

fn data_type(name: &str) -> PyResult<DataType> {
    DataType::from_short_name(name).ok_or_else(|| ConfigError::new_err(format!("'{name}' is no type of numbers")))
}

impl Asked {
    fn work(self) -> PyResult<(String, Work)> {
        Ok(match self {
            Self::Kernel { name, grid, threads, bytes } => {
                (name, Work::Kernel { grid, threads_per_block: threads, bytes })
            }
            Self::Gemm { m, n, k, batch, input, compute } => {
                let (input, compute) = match (data_type(&input)?, data_type(&compute)?) {
                    (DataType::Tf32, _) => (DataType::Float32, DataType::Tf32),
                    types => types,
                };
                (String::new(), Work::Gemm { m, n, k, batch, input, compute })
            }
            Self::Operator { name, flop, bytes, input } => {
                (name, Work::Operator { flops: flop, bytes, input: data_type(&input)? })
            }
        })
    }
}

/// Durations of pieces of device work as an emulated run takes them: `[{"ns": float, "class", "family", "provenance"}]` for
/// a list of `{"kernel": {name, grid, threads, bytes}}`, `{"gemm": {m, n, k, batch, input, compute}}`,
/// `{"operator": {name, flop, bytes, input}}`.
#[pyfunction]
pub(crate) fn work_durations_json(profile: &str, kernels: Vec<String>, works_json: &str) -> PyResult<String> {
    let profile = profile_of(Some(profile), None)?;
    let table = table_of(&kernels, &profile)?;
    let mut durations = Durations::new(profile, table);
    let asked: Vec<Asked> = serde_json::from_str(works_json).map_err(|error| from_json("works", &error))?;
    let mut found = Vec::with_capacity(asked.len());
    for (index, asked) in asked.into_iter().enumerate() {
        let (name, work) = asked.work()?;
        let estimate = durations.estimate(&work, NameId(index as u32), || &name);
        found.push(json!({
            "ns": estimate.duration.as_ps() as f64 / 1e3,
            "class": estimate.class,
            "family": estimate.family,
            "provenance": estimate.provenance,
        }));
    }
    Ok(Value::Array(found).to_string())
}
