"""The laboratory: comparisons of placements on equal terms, and reports that say what they showed."""

from normstream.lab.compare import compare as compare
from normstream.lab.conclusion import conclusion as conclusion
from normstream.lab.markdown import markdown_page as markdown_page
from normstream.lab.markdown import markdown_table as markdown_table
from normstream.lab.plan import CompareConfig as CompareConfig
from normstream.lab.report import write_report as write_report
from normstream.lab.summary import read_summary as read_summary
