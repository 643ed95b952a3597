//! Which rank a file is of.

use super::event::RankTrace;
use crate::ImportError;
use crate::notes::Notes;
use std::collections::BTreeMap;

/// Largest rank that is believed.
const MAX_RANK: u32 = 1 << 22;

/// The ranks of files in order: as the caller says, else as the header says, else as the name says (`rank_3.json`,
/// `worker3...`); a single file without any of these is rank 0.
pub fn assign(
    traces: &[RankTrace],
    overrides: &BTreeMap<String, u32>,
    notes: &mut Notes,
) -> Result<Vec<u32>, ImportError> {
    if let Some(unknown) = overrides.keys().find(|name| !traces.iter().any(|trace| trace.file == **name)) {
        return Err(ImportError::unfit(format!("a rank is given for {unknown}, which is none of the files")));
    }
    let mut owner: BTreeMap<u32, &str> = BTreeMap::new();
    let mut ranks = Vec::with_capacity(traces.len());
    for trace in traces {
        let file = trace.file.as_str();
        let told = overrides.get(file).copied().or(trace.claimed_rank);
        let rank = match told.or_else(|| rank_of_name(file)) {
            Some(rank) => {
                if told.is_none() {
                    notes.add("ranks_from_file_names", || {
                        format!("{file}: no distributedInfo.rank; rank {rank} by its name")
                    });
                }
                rank
            }
            None if traces.len() == 1 => {
                notes.add("ranks_assumed", || {
                    format!("{file}: no distributedInfo.rank and none in its name; taken as rank 0")
                });
                0
            }
            None => {
                return Err(ImportError::unfit(format!(
                    "{file} says no rank, neither inside (distributedInfo) nor in its name: name it with --rank {file}=RANK"
                )));
            }
        };
        if rank > MAX_RANK {
            return Err(ImportError::unfit(format!("{file} claims rank {rank}, beyond the limit of {MAX_RANK}")));
        }
        if let Some(other) = owner.insert(rank, file) {
            return Err(ImportError::unfit(format!(
                "{other} and {file} both claim rank {rank}: leave one out, or name its rank with --rank {file}=RANK"
            )));
        }
        ranks.push(rank);
    }
    Ok(ranks)
}

/// The number behind the last `rank` or `worker` of a name.
#[must_use]
pub fn rank_of_name(file: &str) -> Option<u32> {
    let lower = file.to_lowercase();
    ["rank", "worker"].iter().find_map(|word| {
        let rest = &lower[lower.rfind(word)? + word.len()..];
        let digits = rest.trim_start_matches(['-', '_', '.', '=']);
        let end = digits.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse().ok()
    })
}
