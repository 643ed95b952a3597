//! Imports traces and prints the account: `kineto PATH...`.
use prism_import::kineto::{Options, import};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let paths: Vec<_> = std::env::args_os().skip(1).map(Into::into).collect();
    let imported = import(&paths, &Options::default())?;
    let account = serde_json::to_string_pretty(&imported.summary)?;
    #[allow(clippy::print_stdout, reason = "it is what the example is for")]
    {
        println!("{account}");
    }
    Ok(())
}
