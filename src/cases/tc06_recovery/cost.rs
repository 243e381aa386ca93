//! What a takeover costs by the blocks that it recovers.

use serde::Serialize;

use super::judge;
use crate::cases::scene::Scene;
use crate::cases::takeover::{VICTIM, bring_back, held_blocks, taken_over};
use crate::engine::BoxFuture;
use crate::failure::Failure;
use crate::timeline::{Fit, Growth, growth};

/// Blocks at which a takeover is measured, as far as the pool has room for them.
const SIZES: [u64; 3] = [16, 256, 4096];
/// What two measurements of the same may differ by, in milliseconds: a machine that is shared
/// needs that long to give a process its turn.
const NOISE_MS: f64 = 100.0;

/// What is kept beside the result.
#[derive(Debug, Serialize)]
struct Document {
    /// Recovered blocks, and milliseconds of the whole takeover.
    promotion: Vec<(u64, f64)>,
    /// Recovered blocks, and milliseconds in which the journal was read.
    recovery: Vec<(u64, f64)>,
    /// A line through `promotion`: milliseconds, and milliseconds a block.
    fit: Option<Fit>,
    /// How it grows.
    growth: Growth,
    /// What measurements may differ by, in milliseconds.
    noise_ms: f64,
}

pub(super) fn curve<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let slots = u64::from(scene.config().profile.kvcr.dram_slots);
        if !emptied(scene, SIZES[0]).await? {
            return Ok(());
        }
        let (mut promotion, mut recovery) = (Vec::new(), Vec::new());
        for (round, size) in SIZES.map(|size| size.min(slots)).into_iter().enumerate() {
            let held = fill(scene, round, size).await?;
            let kill = scene.kill(VICTIM).await?;
            if let Some(seen) = taken_over(scene, &kill, held).await?
                && let (Some(blocks), Some(ms)) = (seen.recovered_blocks, seen.promotion_ms)
            {
                promotion.push((blocks, ms));
                recovery.extend(seen.recovery_ms.map(|ms| (blocks, ms)));
            }
            if bring_back(scene, VICTIM).await?.is_none() {
                break;
            }
        }
        let points: Vec<(f64, f64)> = promotion.iter().map(|(x, y)| (*x as f64, *y)).collect();
        let document = Document {
            fit: Fit::of(&points),
            growth: growth(&points, NOISE_MS),
            promotion,
            recovery,
            noise_ms: NOISE_MS,
        };
        scene.keep("cost.json", &document)?;
        scene.note(format!(
            "blocks and milliseconds of a takeover: {:?}",
            document.promotion
        ));
        if let Some(fit) = &document.fit {
            scene.note(format!(
                "a line through them: {:.3} ms and {:.3} µs a block; no point is further from it than {:.3} ms",
                fit.intercept,
                fit.slope * 1000.0,
                fit.residual
            ));
        }
        scene.check(judge::cost(&document.growth));
        Ok(())
    })
}

/// Gives worker 0 a new pool where it holds more than `most` blocks: by a new service, for nothing
/// else empties one. Whether worker 0 serves.
async fn emptied(scene: &mut Scene<'_>, most: u64) -> Result<bool, Failure> {
    let held = held_blocks(scene, VICTIM, "found").await?;
    if held.is_none_or(|held| held <= most) {
        return Ok(true);
    }
    scene.kill_service(VICTIM).await?;
    scene.replace_service(VICTIM).await?;
    if !scene.has_died(VICTIM)? {
        scene.kill_whole(VICTIM).await?;
    }
    Ok(bring_back(scene, VICTIM).await?.is_some())
}

/// Has worker 0 compute prompts until its pool holds at least `size` blocks, or as many as it
/// will; how many there are.
async fn fill(scene: &mut Scene<'_>, round: usize, size: u64) -> Result<Option<u64>, Failure> {
    let blocks = scene.blocks();
    // Half of the longest sequence, as fillers elsewhere.
    let most = blocks
        .full(u64::from(scene.config().profile.engine.max_model_len) / 2)
        .max(1);
    let mut held = held_blocks(scene, VICTIM, &format!("round{round}.before")).await?;
    let mut number = 0;
    while let Some(missing) = size
        .checked_sub(held.unwrap_or(size))
        .filter(|some| *some > 0)
    {
        let before = held;
        // As many as are missing, but not one at a time.
        let lots = missing.div_ceil(most);
        for _ in 0..lots {
            let label = format!("round{round}.fill{number}");
            let tokens = scene.tokens(missing.min(most)) + scene.tokens(1) / 2;
            let prompt = scene.prompt(&label, tokens);
            scene.ask(&label, &prompt, VICTIM).await?;
            number += 1;
        }
        held = held_blocks(scene, VICTIM, &format!("round{round}.{number}")).await?;
        if held <= before {
            // It evicts as much as it takes in.
            break;
        }
    }
    Ok(held)
}
