"""Metric names and reductions, writers, progress, pictures and the HTML report.

Importing this room is cheap: matplotlib, jinja2, rich and tensorboardX are imported where they are used (the extra
``train`` has them).
"""

from trm_jax.report.catalogue import METRICS as METRICS
from trm_jax.report.catalogue import Metric as Metric
from trm_jax.report.console import ConsoleProgress as ConsoleProgress
from trm_jax.report.console import PlannedRun as PlannedRun
from trm_jax.report.figures import render_overview as render_overview
from trm_jax.report.figures import render_panel as render_panel
from trm_jax.report.findings import Finding as Finding
from trm_jax.report.findings import conclude as conclude
from trm_jax.report.html import render_html as render_html
from trm_jax.report.html import write_report as write_report
from trm_jax.report.metrics import check_record as check_record
from trm_jax.report.metrics import reduce_pairs as reduce_pairs
from trm_jax.report.runs import Arm as Arm
from trm_jax.report.runs import ReportData as ReportData
from trm_jax.report.runs import RunResult as RunResult
from trm_jax.report.runs import SeedRun as SeedRun
from trm_jax.report.runs import collect as collect
from trm_jax.report.summary import ArmSummary as ArmSummary
from trm_jax.report.summary import results_table as results_table
from trm_jax.report.summary import summarise as summarise
from trm_jax.report.writers import JsonlWriter as JsonlWriter
from trm_jax.report.writers import MetricWriter as MetricWriter
from trm_jax.report.writers import MultiWriter as MultiWriter
from trm_jax.report.writers import TensorBoardWriter as TensorBoardWriter
from trm_jax.report.writers import read_metrics as read_metrics
